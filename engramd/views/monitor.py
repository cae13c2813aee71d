"""`engramd stats --interval S`: one line an interval, in the manner of iostat, its header repeated.

On a terminal the header comes again with each screenful. Elsewhere it comes once, begins with `#`, and each line is
flushed, so that the output can be cut and plotted.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from engramd.views.rates import Latency, Rates, rates
from engramd.views.turns import intervals

PIPED_HEADER_LINES = 1 << 62  # once
Column = tuple[str, str, int]  # title, unit, width


def run(sample: Callable[[], dict[str, Any]], interval_s: float, count: int | None) -> None:
    """Prints `count` lines (None: until interrupted). sample: statistics with histograms."""
    is_terminal = sys.stdout.isatty()
    for printed, (before, after) in enumerate(intervals(sample, interval_s, count)):
        lines_a_screen = max(2, shutil.get_terminal_size().lines - 3) if is_terminal else PIPED_HEADER_LINES
        if printed % lines_a_screen == 0:
            print("\n".join(header(list(after["latency_us"]), "" if is_terminal else "#")))
        print(line(after, rates(before, after)), flush=True)


def header(classes: list[str], mark: str) -> list[str]:
    """Two lines: what each column is, and its unit."""
    columns = _columns(classes)
    titles = [f"{title:>{width}}" for title, _, width in columns]
    units = [f"{unit:>{width}}" for _, unit, width in columns]
    return [f"{mark:1}{' '.join(titles)[1:]}", f"{mark:1}{' '.join(units)[1:]}"]


def line(stats: dict[str, Any], change: Rates) -> str:
    """One interval: `stats` is its end."""
    cells = [
        time.strftime("%H:%M:%S"),
        f"{change.rows:.0f}",
        f"{change.requests:.0f}",
        f"{change.failed_requests:.0f}",
        "-" if change.hit_share is None else f"{100 * change.hit_share:.1f}",
        f"{change.reads:.0f}",
        f"{change.read_bytes / 1e6:.1f}",
        str(stats["reader"]["in_flight"]),
        f"{stats['dram']['used_bytes'] / (1 << 20):.0f}",
        str(len(stats["sessions"])),
        str(sum(session["waiting"] for session in stats["sessions"])),
    ]
    for name in stats["latency_us"]:
        latency = change.latency.get(name, Latency(0, None, None))
        cells += [_microseconds(latency.p50_us), _microseconds(latency.p99_us)]
    widths = [width for _, _, width in _columns(list(stats["latency_us"]))]
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _columns(classes: list[str]) -> list[Column]:
    columns: list[Column] = [
        ("time", "", 8),
        ("rows", "/s", 9),
        ("reqs", "/s", 7),
        ("fail", "/s", 5),
        ("hit", "%", 5),
        ("reads", "/s", 7),
        ("read", "MB/s", 7),
        ("fly", "", 4),
        ("dram", "MiB", 7),
        ("sess", "", 4),
        ("wait", "", 4),
    ]
    for name in classes:
        # What latency of which requests: the class by its smallest row count.
        columns += [(f">={name.partition('-')[0]}", "p50us", 7), ("rows", "p99us", 7)]
    return columns


def _microseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"

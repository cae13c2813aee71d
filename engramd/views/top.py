"""The screen of `engramd top`: totals, layers, and the sessions that ask for most."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from engramd.sizes import format_size
from engramd.views.rates import rates
from engramd.views.turns import intervals

CLEAR = "\x1b[H\x1b[J"
SORT_KEYS = ("rows", "waiting", "pid")
NAME_WIDTH = 24


def run(sample: Callable[[], dict[str, Any]], interval_s: float, count: int | None, sort: str) -> None:
    """Redraws the terminal `count` times (None: until interrupted); elsewhere prints one block after the other."""
    is_terminal = sys.stdout.isatty()
    for before, after in intervals(sample, interval_s, count):
        lines = screen(before, after, sort)
        if is_terminal:
            size = shutil.get_terminal_size()
            print(CLEAR + "\n".join(one[: size.columns] for one in lines[: max(1, size.lines - 1)]), flush=True)
        else:
            print("\n".join([*lines, ""]), flush=True)


def screen(before: dict[str, Any], after: dict[str, Any], sort: str) -> list[str]:
    """The lines between two samples with histograms."""
    change = rates(before, after)
    dram, reader = after["dram"], after["reader"]
    hit = "-" if change.hit_share is None else f"{100 * change.hit_share:.1f} %"
    tables = ", ".join(f"{table['name']} (generation {table['generation']})" for table in after["tables"])
    lines = [
        f"engramd {after['version']} pid {after['pid']}  {time.strftime('%H:%M:%S')}  serving {tables}",
        f"{change.rows:,.0f} rows/s  {change.requests:,.0f} requests/s  {hit} DRAM hits  "
        f"{change.reads:,.0f} reads/s  {change.read_bytes / 1e6:,.1f} MB/s  "
        f"{reader['in_flight']} of {reader['in_flight_cap']} reads in flight ({reader['kind']})",
        f"DRAM {format_size(dram['used_bytes'])} of {format_size(dram['budget_bytes'])}, {dram['rows_cached']:,} rows  "
        f"arenas {format_size(after['arenas']['bytes'])} of {format_size(after['arenas']['limit_bytes'])}",
        "",
        f"{len(after['sessions'])} session{'' if len(after['sessions']) == 1 else 's'}",
        f"{'pid':>8} {'uid':>6} {'command':<{NAME_WIDTH}} {'rows/s':>12} {'requests/s':>12} {'waiting':>8} "
        f"{'rows':>16} {'for s':>9}",
    ]
    earlier = {session["session"]: session for session in before["sessions"]} if before["pid"] == after["pid"] else {}
    rows = []
    for session in after["sessions"]:
        old = earlier.get(session["session"], {"rows": 0, "requests": 0})
        rates_of = {name: max(0, session[name] - old[name]) / change.seconds for name in ("rows", "requests")}
        rows.append((session, rates_of))
    keys: dict[str, Callable[[Any], Any]] = {
        "rows": lambda one: (-one[1]["rows"], one[0]["session"]),
        "waiting": lambda one: (-one[0]["waiting"], one[0]["session"]),
        "pid": lambda one: (one[0]["pid"], one[0]["session"]),
    }
    for session, rate in sorted(rows, key=keys[sort]):
        lines.append(
            f"{session['pid']:>8} {session['uid']:>6} {session['name'][:NAME_WIDTH]:<{NAME_WIDTH}} "
            f"{rate['rows']:>12,.0f} {rate['requests']:>12,.0f} {session['waiting']:>8} "
            f"{session['rows']:>16,} {session['since_s']:>9.0f}"
        )
    return lines

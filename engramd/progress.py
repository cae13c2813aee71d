"""Progress of long work on stderr: a line that rewrites itself on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from engramd.sizes import format_size

TERMINAL_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 10.0


def format_duration(seconds: float) -> str:
    """A duration for people: ``format_duration(3725) == '1:02:05'``."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Progress:
    """Counts one piece of work in bytes, or in `unit` where one is named. Used by one thread; a context manager that
    ends the line.

    What was `done` before this run (a resumed pack) counts as done, but not for the rate.
    """

    def __init__(self, label: str, total: int, done: int = 0, unit: str = "", stream: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._before = done
        self._done = done
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._shown = self._start if not self._terminal else 0.0

    @property
    def rate(self) -> float:
        """Bytes (or units) per second of this run so far."""
        return (self._done - self._before) / max(time.monotonic() - self._start, 1e-9)

    def advance(self, count: int) -> None:
        """More of it is done. Shows how far it is, where the last time is some while ago."""
        self._done += count
        now = time.monotonic()
        if now - self._shown >= (TERMINAL_INTERVAL_S if self._terminal else PLAIN_INTERVAL_S):
            self._shown = now
            self._show()

    def _show(self) -> None:
        share = 100 * self._done / self._total if self._total else 100.0
        rate = self.rate
        left = format_duration((self._total - self._done) / rate) if rate > 0 else "?"
        total, speed = format_size(self._total), f"{rate / 1e6:.0f} MB/s"
        if self._unit:
            total, speed = f"{self._total:,} {self._unit}", f"{rate:,.0f} a second"
        text = f"{self._label}: {share:.1f} % of {total}, {speed}, {left} left"
        self._stream.write(f"\r\x1b[K{text}" if self._terminal else text + "\n")
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

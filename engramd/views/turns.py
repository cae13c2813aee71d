"""When something that is shown again and again is due: by the clock, so that what it takes to show does not add up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any


def turns(interval_s: float | None, count: int | None) -> Iterator[None]:
    """Yields at once and then every interval: `count` times (None: for ever); without an interval, once."""
    due = time.monotonic()
    for turn in itertools.count(1):
        yield
        if interval_s is None or turn == count:
            return
        due += interval_s
        time.sleep(max(0.0, due - time.monotonic()))


def intervals(
    sample: Callable[[], dict[str, Any]], interval_s: float, count: int | None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields the samples at the beginning and the end of each of `count` intervals (None: for ever), at their end."""
    before: dict[str, Any] | None = None
    for _ in turns(interval_s, None if count is None else count + 1):
        after = sample()
        if before is not None:
            yield before, after
        before = after

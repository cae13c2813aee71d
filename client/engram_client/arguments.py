"""Checks of the scalars that callers pass in: numbers, names, and timeouts with the deadlines that follow from them."""

from __future__ import annotations

import math
import operator
import time
from numbers import Real
from typing import SupportsIndex

LONGEST_HANDSHAKE_S = 86_400.0
MAX_ARENA_BYTES = (1 << 63) - 1


def deadline_of(timeout: float | None) -> float | None:
    """When a timeout in seconds from now is over, by time.monotonic(); None for None and infinity.

    TypeError where it is no number, ValueError where it is negative or NaN.
    """
    if timeout is None:
        return None
    seconds = _seconds(timeout)
    if not seconds >= 0:
        raise ValueError(f"timeout must be 0 or more seconds, or None for no limit, not {timeout}")
    return None if math.isinf(seconds) else time.monotonic() + seconds


def handshake_timeout(timeout: float) -> float:
    """The timeout of connect() in seconds. TypeError, ValueError."""
    seconds = _seconds(timeout)
    if not 0 < seconds <= LONGEST_HANDSHAKE_S:
        raise ValueError(f"timeout must be more than 0 and at most {LONGEST_HANDSHAKE_S:.0f} seconds, not {timeout}")
    return seconds


def integer(name: str, value: SupportsIndex, least: int, most: int) -> int:
    """An integer in a range. TypeError, ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be {least} .. {most}, not {number}")
    return number


def text_or_none(name: str, value: str | None) -> str | None:
    """A text or None. TypeError."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a string or None, not {value!r}")
    return value


def _seconds(timeout: object) -> float:
    if not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    return float(timeout)

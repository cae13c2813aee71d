"""Sizes as people write them: a plain integer is bytes; 512MiB, 32GiB, 1.5TiB and decimal 200MB are understood."""

from __future__ import annotations

import re
from fractions import Fraction

from engramd.errors import EngramdError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})", re.ASCII)
MAX_SIZE_BYTES = (1 << 63) - 1


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4096``, ``512MiB`` or ``1.5GiB``; raises EngramdError naming the text."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise EngramdError(f"not a size: {text!r} (write bytes as a plain integer, or for example 512MiB or 32GiB)")
    size = Fraction(match[1]) * unit
    if size.denominator != 1:
        raise EngramdError(f"not a whole number of bytes: {text!r}")
    if size > MAX_SIZE_BYTES:
        raise EngramdError(f"size too large: {text!r} (the limit is {MAX_SIZE_BYTES} bytes)")
    return int(size)


def format_size(count_bytes: float) -> str:
    """A size for people, in binary units: ``format_size(195 << 30) == '195.0 GiB'``."""
    size = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

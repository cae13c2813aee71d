"""Damage to files, for tests of what notices it."""

from __future__ import annotations

import os
from pathlib import Path


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Changes one bit of the byte at `position` (negative: from the end)."""
    with open(path, "r+b") as file:
        place = file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        changed = file.read(1)[0] ^ 1 << bit
        file.seek(place)
        file.write(bytes([changed]))

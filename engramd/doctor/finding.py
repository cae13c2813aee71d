"""One line of a doctor's report, and the machine's own files behind it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum


class Grade(Enum):
    """OK: as it should be. WARN: it works, but worse than it could. FAIL: it will not serve."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """`fix` is what to do about it; empty where nothing is to be done. `figures`: what was measured, for programs."""

    grade: Grade
    subject: str
    text: str
    fix: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def ok(subject: str, text: str) -> Finding:
    """As it should be."""
    return Finding(Grade.OK, subject, text)


def warn(subject: str, text: str, fix: str) -> Finding:
    """Works, but worse than it could."""
    return Finding(Grade.WARN, subject, text, fix)


def fail(subject: str, text: str, fix: str) -> Finding:
    """Will not serve."""
    return Finding(Grade.FAIL, subject, text, fix)


class Machine:
    """The kernel's files under /proc, /sys and /etc. `root` lets tests put another machine's there."""

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def path(self, name: str) -> str:
        """Where a file such as `proc/meminfo` is."""
        return os.path.join(self._root, name)

    def read(self, name: str) -> str | None:
        """A small file's text without the white space around it, or None where it cannot be read."""
        try:
            with open(self.path(name), encoding="utf-8", errors="replace") as file:
                return file.read(1 << 20).strip()
        except OSError:
            return None

    def names(self, name: str) -> list[str]:
        """A folder's entries, sorted; none where it cannot be read."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def fields(self, name: str) -> dict[str, str]:
        """A file of `Key: value` lines, such as proc/meminfo."""
        lines = (line.partition(":") for line in (self.read(name) or "").splitlines())
        return {key.strip(): value.strip() for key, _, value in lines}

    def kib(self, name: str, key: str) -> int | None:
        """Bytes of a `Key: N kB` line."""
        words = self.fields(name).get(key, "").split()
        return int(words[0]) * 1024 if words and words[0].isdigit() else None

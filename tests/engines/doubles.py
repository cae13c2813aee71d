"""Doubles that tests of several engines use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Prefetcher:
    """Stands for an ArrivalPrefetcher: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.told.append((name, *arguments))

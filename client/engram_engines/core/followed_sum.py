"""Sums of this process as counters of prometheus_client, for the engine's own /metrics.

Engines run their ranks and schedulers in processes of their own. What prometheus_client counts there appears in the
engine's /metrics where PROMETHEUS_MULTIPROC_DIR names a folder that all of its processes share (docs/vllm.md,
docs/sglang.md). Both engines need prometheus_client themselves; without it nothing is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

#: Whoever has sums hands them on about so often, so that counting costs a step nothing.
HAND_ON_S = 1.0


class FollowedSum:
    """A sum that only grows, and the counter that follows it. Used by one thread at a time.

    name: of the counter, without "_total". text: its help. read: the sum at this moment. labels: the counter's.
    """

    def __init__(self, name: str, text: str, read: Callable[[], float], **labels: object) -> None:
        family = _family(name, text, tuple(labels))
        self._counter = family.labels(**labels) if labels and family is not None else family
        self._read = read
        self._handed_on = 0.0

    def hand_on(self) -> None:
        """Brings the counter up to date."""
        if self._counter is not None:
            value = self._read()
            self._counter.inc(value - self._handed_on)
            self._handed_on = value


@cache
def _family(name: str, text: str, labels: tuple[str, ...]) -> Any:
    """One for a process; None without prometheus_client."""
    counter = _counter_class()
    return counter(name, text, labels) if counter is not None else None


@cache
def _counter_class() -> Any:
    """Imported late: prometheus_client looks for PROMETHEUS_MULTIPROC_DIR when it is imported, and engines set it when
    they start."""
    try:
        from prometheus_client import Counter
    except ImportError:
        logger.info("engramd: prometheus_client is not installed, so the engine's /metrics has nothing of engramd")
        return None
    return Counter

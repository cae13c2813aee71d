"""What a rank's steps have cost, for the engine's own /metrics and for its log.

Steps only add to StageCounters. From there the sums are handed on about once a second (followed_sum.py), so that a step
pays for one look at the clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from .followed_sum import HAND_ON_S, FollowedSum
from .step_stager import StageCounters

logger = logging.getLogger(__name__)

_LOG_S = 60.0


class StepMetrics:
    """Sums of one kind of steps of one rank. Used by the thread that runs them.

    kind: what the steps are, a label: "step", or "prompt" and "lookup" where an engine has both. sources: the counters
    of each stager that takes part in every one of these steps, with the layers that it stages, in its order.
    """

    def __init__(self, kind: str, rank: int, sources: Sequence[tuple[StageCounters, Sequence[int]]]) -> None:
        self._kind = kind
        self._sources = list(sources)
        labels = {"kind": kind, "rank": rank}
        self._sums = [
            FollowedSum("engramd_steps", "Steps whose rows were asked for", self._steps, **labels),
            FollowedSum("engramd_step_rows", "Rows that steps asked for, all layers", self._rows, **labels),
            FollowedSum(
                "engramd_step_ids_wait_seconds",
                "Time the host waited for row ids, which contains all that the device had still to do before",
                self._ids_wait_s,
                **labels,
            ),
        ]
        self._sums += [
            FollowedSum(
                "engramd_step_rows_wait_seconds",
                "Time the host waited for the daemon, by layer",
                _wait_of(counters, position),
                **labels,
                layer=layer,
            )
            for counters, layers in self._sources
            for position, layer in enumerate(layers)
        ]
        self._due = time.monotonic()
        self._log_due = self._due + _LOG_S
        self._logged = (0.0, 0.0, 0.0, 0.0)

    def tick(self) -> None:
        """After each step: hands the sums on where that is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + HAND_ON_S
        self.hand_on()
        if now >= self._log_due:
            self._log_due = now + _LOG_S
            self._log()

    def hand_on(self) -> None:
        """Hands the sums on to prometheus_client at once."""
        for one in self._sums:
            one.hand_on()

    def _steps(self) -> float:
        return max((counters.steps for counters, _ in self._sources), default=0)

    def _rows(self) -> float:
        return sum(counters.rows for counters, _ in self._sources)

    def _ids_wait_s(self) -> float:
        return sum(counters.ids_wait_s for counters, _ in self._sources)

    def _rows_wait_s(self) -> float:
        return sum(sum(counters.store_wait_s) for counters, _ in self._sources)

    def _log(self) -> None:
        sums = (self._steps(), self._rows(), self._ids_wait_s(), self._rows_wait_s())
        steps, rows, ids_s, rows_s = (new - old for new, old in zip(sums, self._logged, strict=True))
        self._logged = sums
        if steps:
            logger.info(
                "engramd, %s: %d steps, %d rows; one waited %.3f ms for ids (earlier device work), %.3f ms for rows",
                self._kind,
                steps,
                rows,
                ids_s / steps * 1000,
                rows_s / steps * 1000,
            )


def _wait_of(counters: StageCounters, position: int) -> Callable[[], float]:
    return lambda: counters.store_wait_s[position]

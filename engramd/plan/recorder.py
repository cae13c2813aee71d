"""Takes samples off a running daemon into bounded memory.

The rate falls by half whenever the memory is full, and whenever the daemon has had to let samples go because nobody
took them in time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engramd._engine import lib
from engramd.errors import EngramdError
from engramd.plan.recording import RecordedLayer, Recording, thin

LEAST_DEFAULT_RATE = 1 / 64
DEFAULT_SAMPLED_ROWS = 1 << 18  # of all rows served: of small tables a fixed share would be too few for any curve
POLL_S = 0.2
BUFFER_SAMPLES = 1 << 20  # in the daemon: 8 MiB
MIN_THRESHOLD = 1 << 8


class Daemon(Protocol):
    """What is needed of engramd.cli.control_client.ControlClient."""

    path: str

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]: ...


class Recorder:
    """One recording. `capacity` samples of 8 bytes are kept at most. rate: the share of the rows to begin with (None:
    by the size of the daemon's tables). Raises EngramdError where the daemon does not answer."""

    def __init__(self, daemon: Daemon, capacity: int, rate: float | None = None) -> None:
        self._daemon = daemon
        self._capacity = capacity
        if rate is None:
            rows = sum(layer["rows"] for layer in daemon.ask("tables")["tables"])
            rate = min(1.0, max(LEAST_DEFAULT_RATE, DEFAULT_SAMPLED_ROWS / rows))
        self.threshold = max(MIN_THRESHOLD, round(rate * lib.ENGRAM_SAMPLE_ALL))
        self._layers: dict[int, RecordedLayer] = {}  # by handle, of all generations that were served meanwhile
        self._pieces: list[NDArray[np.uint64]] = []
        self.samples = 0
        self.lookups = 0
        self.ended_by: str | None = None  # why the daemon gave no more, where that is so
        self._lost = 0.0  # as many as self.threshold would have sampled
        self._lost_told = 0  # by the daemon, in all
        self._threshold_told = self.threshold  # to the daemon, which samples by it since

    def run(self, seconds: float | None, wanted: Callable[[], bool], shown: Callable[[Recorder], None]) -> Recording:
        """Records until `seconds` have passed (None: no limit), `wanted` says no or the daemon gives no more
        (`ended_by`). Raises EngramdError where it refuses to begin."""
        reply = self._daemon.ask("record_start", threshold=self.threshold, capacity=BUFFER_SAMPLES)
        self._add_layers(reply)
        started = time.monotonic()
        try:
            while True:
                left = POLL_S if seconds is None else min(POLL_S, seconds - (time.monotonic() - started))
                is_last = left <= 0 or not wanted()  # looked at before what was asked for until then is taken
                self._take()
                shown(self)
                if is_last:
                    break
                time.sleep(left)
        except EngramdError as error:
            self.ended_by = str(error)
        finally:
            self._stop()
        elapsed = time.monotonic() - started
        keys = thin(np.concatenate([*self._pieces, np.empty(0, np.uint64)]), self.threshold)
        return Recording(tuple(self._layers.values()), self.threshold, self.lookups, round(self._lost), elapsed, keys)

    def _take(self) -> None:
        while True:
            reply = self._daemon.ask("record_take", threshold=self.threshold)
            keys = np.frombuffer(reply["keys"], dtype="<u8").astype(np.uint64)
            self.lookups = reply["lookups"]
            self._add_layers(reply)
            self._pieces.append(keys)
            self.samples += keys.size
            self._count_lost(reply["lost"])
            while self.samples > self._capacity and self.threshold > MIN_THRESHOLD:
                self._lower_rate()
            if not reply["left"]:
                return

    def _add_layers(self, reply: dict[str, Any]) -> None:
        for entry in reply["layers"]:
            layer = RecordedLayer(**{**entry, "head_sizes": tuple(entry["head_sizes"])})
            self._layers.setdefault(layer.handle, layer)

    def _count_lost(self, lost: int) -> None:
        """lost: all so far. What was lost since the last call was sampled at the rate that it asked for."""
        since, self._lost_told = lost - self._lost_told, lost
        self._lost += since * self.threshold / self._threshold_told
        too_fast = since > 0 and self._threshold_told == self.threshold > MIN_THRESHOLD
        self._threshold_told = self.threshold
        if too_fast:
            self._lower_rate()

    def _lower_rate(self) -> None:
        self.threshold //= 2
        self._pieces = [thin(np.concatenate(self._pieces), self.threshold)]
        self.samples = self._pieces[0].size
        self._lost /= 2

    def _stop(self) -> None:
        # Where it fails the daemon is gone, and its side of the recording with it.
        with contextlib.suppress(EngramdError):
            self._daemon.ask("record_stop")

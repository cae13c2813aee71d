"""Takes samples off a running daemon into bounded memory: the rate falls by half whenever the memory is full."""

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

DEFAULT_RATE = 1 / 64
POLL_S = 0.2
BUFFER_SAMPLES = 1 << 20  # in the daemon: 8 MiB
MIN_THRESHOLD = 1 << 8


class Daemon(Protocol):
    """What is needed of engramd.cli.control_client.ControlClient."""

    path: str

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]: ...


class Recorder:
    """One recording. `capacity` samples of 8 bytes are kept at most."""

    def __init__(self, daemon: Daemon, capacity: int, rate: float = DEFAULT_RATE) -> None:
        self._daemon = daemon
        self._capacity = capacity
        self.threshold = max(MIN_THRESHOLD, round(rate * lib.ENGRAM_SAMPLE_ALL))
        self._pieces: list[NDArray[np.uint64]] = []
        self.samples = 0
        self.lookups = 0
        self.lost = 0

    def run(self, seconds: float | None, wanted: Callable[[], bool], shown: Callable[[Recorder], None]) -> Recording:
        """Records until `seconds` have passed (None: no limit) or `wanted` says no. Raises EngramdError where the
        daemon refuses or stops."""
        reply = self._daemon.ask("record_start", threshold=self.threshold, capacity=BUFFER_SAMPLES)
        layers = tuple(
            RecordedLayer(**{**entry, "head_sizes": tuple(entry["head_sizes"])}) for entry in reply["layers"]
        )
        started = time.monotonic()
        try:
            while wanted() and (seconds is None or time.monotonic() - started < seconds):
                left = POLL_S if seconds is None else min(POLL_S, seconds - (time.monotonic() - started))
                time.sleep(max(0.0, left))
                self._take()
                shown(self)
            elapsed = time.monotonic() - started
        finally:
            self._stop()
        keys = thin(np.concatenate([*self._pieces, np.empty(0, np.uint64)]), self.threshold)
        return Recording(layers, self.threshold, self.lookups, self.lost, elapsed, keys)

    def _take(self) -> None:
        while True:
            reply = self._daemon.ask("record_take", threshold=self.threshold)
            keys = np.frombuffer(reply["keys"], dtype="<u8").astype(np.uint64)
            self.lookups, self.lost = reply["lookups"], reply["lost"]
            self._pieces.append(keys)
            self.samples += keys.size
            while self.samples > self._capacity and self.threshold > MIN_THRESHOLD:
                self.threshold //= 2
                self._pieces = [thin(np.concatenate(self._pieces), self.threshold)]
                self.samples = self._pieces[0].size
            if not reply["left"]:
                return

    def _stop(self) -> None:
        # Where it fails the daemon is gone, and the recording with it; what was taken is kept.
        with contextlib.suppress(EngramdError):
            self._daemon.ask("record_stop")

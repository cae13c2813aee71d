"""The hits that the row cache would have had, by its own policy code over row ids and without any I/O."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from engramd._engine import ffi, lib
from engramd.errors import EngramdError

KEY_ROW_BITS: int = lib.ENGRAM_KEY_ROW_BITS
CHUNK_KEYS = 1 << 20


class CacheSimulation:
    """A row cache that keeps keys only. A context manager; used by one thread at a time.

    capacity_rows: how many rows fit, with no allowance for metadata; 0 keeps nothing. Raises EngramdError where
    memory is short.
    """

    def __init__(self, capacity_rows: int) -> None:
        if not 0 <= capacity_rows < 1 << 64:
            raise EngramdError(f"cannot simulate a cache of {capacity_rows:,} rows: the limits are 0 and 2^64 - 1")
        self._handle = lib.engram_simulation_create(capacity_rows) if capacity_rows else ffi.NULL
        if capacity_rows and self._handle == ffi.NULL:
            raise EngramdError(f"not enough memory to simulate a cache of {capacity_rows:,} rows")

    def run(self, keys: npt.NDArray[np.int64]) -> int:
        """Looks up int64 keys of any shape in C order and admits what is missing; returns the number of hits."""
        if self._handle == ffi.NULL:
            return 0
        keys = np.ascontiguousarray(keys, np.int64)
        return int(lib.engram_simulation_run(self._handle, ffi.from_buffer("int64_t[]", keys), keys.size))

    def misses(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """The same, and returns which of the keys were missing: bool, flat. Needs room for at least one row."""
        keys = np.ascontiguousarray(keys, np.int64)
        missed = np.empty(keys.size, np.bool_)
        lib.engram_simulation_trace(
            self._handle,
            ffi.from_buffer("int64_t[]", keys),
            keys.size,
            ffi.from_buffer("uint8_t[]", missed, require_writable=True),
        )
        return missed

    def close(self) -> None:
        lib.engram_simulation_destroy(self._handle)
        self._handle = ffi.NULL

    def __enter__(self) -> CacheSimulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class CacheResult:
    """requests counts ids that are not negative; the second half is that of the first axis, after the first half has
    warmed the cache."""

    capacity_rows: int
    requests: int
    hits: int
    second_half_requests: int
    second_half_hits: int
    elapsed_s: float


def simulate(ids: npt.NDArray[np.signedinteger], capacity_rows: int) -> CacheResult:
    """Runs an array of row ids through a cache of capacity_rows rows.

    ids: integers [tokens], [tokens, columns] of one layer or [tokens, layers, columns], in C order; an id belongs to
    its layer. Negative ids ask for zeros and are not counted. Raises EngramdError for other shapes, types or ids.
    """
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2, 3):
        raise EngramdError(
            f"row ids are integers [tokens], [tokens, columns] or [tokens, layers, columns], "
            f"not {ids.dtype} {ids.shape}"
        )
    layers = ids.shape[1] if ids.ndim == 3 else 1
    layer_bits = (np.arange(1, layers + 1, dtype=np.int64) << KEY_ROW_BITS)[:, None] if ids.ndim == 3 else np.int64(0)
    per_token = max(1, ids[:1].size)
    half, step = len(ids) // 2, max(1, CHUNK_KEYS // per_token)
    edges = [*range(0, half, step), *range(half, len(ids), step), len(ids)]
    requests, hits = [0, 0], [0, 0]
    began = time.perf_counter()
    with CacheSimulation(capacity_rows) as simulation:
        for begin, end in itertools.pairwise(edges):
            keys = ids[begin:end].astype(np.int64)
            if keys.size and ids.ndim == 3 and int(keys.max()) >= 1 << KEY_ROW_BITS:
                raise EngramdError(f"row id {int(keys.max())} is out of range: ids of several layers are below 2^40")
            keys = np.where(keys < 0, np.int64(-1), keys | layer_bits)
            part = int(begin >= half)
            requests[part] += int(np.count_nonzero(keys >= 0))
            hits[part] += simulation.run(keys)
    return CacheResult(capacity_rows, sum(requests), sum(hits), requests[1], hits[1], time.perf_counter() - began)

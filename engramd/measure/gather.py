"""The limit for rows in DRAM: the engine's own copying loop in this process, over the same kind of memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from engramd._engine import ffi, lib
from engramd.errors import EngramdError

Ids = npt.NDArray[np.int64]


class LocalGather:
    """The in-process limit: the same number of rows, in the same kind of memory, copied by the engine's own loop."""

    def __init__(self, rows: int, reply_rows: int, threads: int = 1, row_bytes: int = 264) -> None:
        self.threads = threads
        self.handle = lib.engram_bench_gather_create(rows, row_bytes, reply_rows, threads)
        if self.handle == ffi.NULL:
            raise EngramdError(f"no memory for a gather of {rows:,} rows of {row_bytes} B in this process")
        self.rows = np.frombuffer(
            ffi.buffer(lib.engram_bench_gather_rows(self.handle), rows * row_bytes), np.uint8
        ).reshape(rows, row_bytes)

    def run(self, ids: Ids, batch: int) -> float:
        """Rows a second over ids, batch after batch."""
        taken = lib.engram_bench_gather_run(self.handle, ffi.from_buffer("int64_t[]", ids), batch, len(ids) // batch)
        return float(ids.size / taken)

    def run_plain(self, ids: Ids, batch: int) -> float:
        """The same by one memcpy after the other on one thread, as a first version would do it."""
        taken = lib.engram_bench_gather_run_plain(
            self.handle, ffi.from_buffer("int64_t[]", ids), batch, len(ids) // batch
        )
        return float(ids.size / taken)

    def close(self) -> None:
        self.rows = self.rows[:0].copy()
        lib.engram_bench_gather_destroy(self.handle)
        self.handle = ffi.NULL


def by_take(rows: Any, ids: Ids, batch: int, out: Any) -> float:
    """Rows a second by numpy.take into the same `out` [batch, row_bytes], batch after batch."""
    began = time.perf_counter()
    for start in range(0, len(ids), batch):
        np.take(rows, ids[start : start + batch], axis=0, out=out, mode="clip")
    return len(ids) / (time.perf_counter() - began)

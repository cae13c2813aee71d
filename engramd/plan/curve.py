"""Miss-ratio curves: what caches of many sizes miss of a sampled stream, under our policy and at Belady's limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engramd._engine import ffi, lib
from engramd.errors import EngramdError
from engramd.plan.stream import Stream
from engramd.sizes import format_size

MIN_SIMULATED_ROWS = 256  # below, a cache's few reserved slots would tell in the result


@dataclass(frozen=True)
class Misses:
    """Misses by class of look-up (Stream.classes), scaled up to the whole stream: over all of it, from a cold cache,
    and over its second half, with the first half as warm-up."""

    whole: NDArray[np.float64]
    second_half: NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A cache with room for `rows`. `bytes` are those rows' own; `dram_bytes` is what `--dram` must be for them."""

    rows: int
    bytes: int
    dram_bytes: int
    ours: Misses
    belady: Misses


@dataclass(frozen=True)
class Curve:
    """Points from the smallest on. lookups: by class, of the whole stream and of its second half."""

    stream: Stream
    points: tuple[Point, ...]
    lookups: NDArray[np.float64]
    second_half_lookups: NDArray[np.float64]

    def hit_ratio(
        self, misses: NDArray[np.float64], *, second_half: bool, select: NDArray[np.bool_] | None = None
    ) -> float:
        """1 - misses / look-ups over the selected classes (None: all)."""
        lookups = self.second_half_lookups if second_half else self.lookups
        if select is not None:
            misses, lookups = misses[select], lookups[select]
        total = float(lookups.sum())
        return max(0.0, 1.0 - float(misses.sum()) / total) if total else 0.0


def default_sizes(table_bytes: int) -> list[int]:
    """1 and 1.5 times each power of two from 1/512 of the table on, below the table's size; then the table's."""
    sizes = []
    power = 1 << max(16, (table_bytes // 512).bit_length() - 1)
    while power < table_bytes:
        sizes += [size for size in (power, power + power // 2) if size < table_bytes]
        power *= 2
    return [*sizes, table_bytes]


def budget_for(rows: int, row_bytes: int) -> int:
    """The smallest `--dram`, to 1/4096 of it, whose cache holds so many rows with index, queues and ghosts."""
    low, high = rows * row_bytes, rows * (row_bytes + 64) + (1 << 16)
    while high - low > high // 4096 + 1:
        middle = (low + high) // 2
        if lib.engram_cache_rows(middle, row_bytes) >= rows:
            high = middle
        else:
            low = middle
    return high


def measure(stream: Stream, sizes: list[int], progress: Callable[[int], None] = lambda lookups: None) -> Curve:
    """Simulates a cache of each size (bytes of rows). Sizes whose imitation would hold fewer than MIN_SIMULATED_ROWS
    rows are left out. Raises EngramdError where none is left or memory is short."""
    capacities = sorted({min(size // stream.row_bytes, stream.rows) for size in sizes})
    usable = [rows for rows in capacities if rows * stream.rate >= MIN_SIMULATED_ROWS or stream.rate == 1.0]
    usable = [rows for rows in usable if rows >= 2]
    if not usable:
        smallest = int(MIN_SIMULATED_ROWS / stream.rate) * stream.row_bytes
        raise EngramdError(
            f"no size can be simulated: the sample holds one row in {1 / stream.rate:.0f}, which serves for caches "
            f"of at least {format_size(smallest)}; name larger --sizes, or take more (--samples, --rate of `record`)"
        )
    next_uses = np.empty(stream.keys.size, np.uint32)
    key_pointer = ffi.from_buffer("uint64_t[]", stream.keys)
    next_pointer = ffi.from_buffer("uint32_t[]", next_uses, require_writable=True)
    if lib.engram_next_uses(key_pointer, stream.keys.size, next_pointer) != 0:
        raise EngramdError(f"no memory for a sample of {stream.keys.size:,} look-ups: lower --samples")

    def simulate(rows: int) -> Point:
        simulated = max(2, round(rows * stream.rate))
        ours = _run(stream, lambda missed: _run_ours(key_pointer, stream.keys.size, simulated, missed))
        belady = _run(
            stream, lambda missed: int(lib.engram_belady_run(next_pointer, stream.keys.size, simulated, missed)) >= 0
        )
        progress(stream.keys.size)
        return Point(rows, rows * stream.row_bytes, budget_for(rows, stream.row_bytes), ours, belady)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        points = tuple(pool.map(simulate, usable))
    lookups = stream.lookups.astype(np.float64)
    return Curve(stream, points, lookups, lookups / 2)


def _run_ours(keys: Any, count: int, rows: int, missed: Any) -> bool:
    simulation = lib.engram_simulation_create(rows)
    if simulation == ffi.NULL:
        return False
    try:
        lib.engram_simulation_trace(simulation, ffi.cast("int64_t *", keys), count, missed)
    finally:
        lib.engram_simulation_destroy(simulation)
    return True


def _run(stream: Stream, simulate: Callable[[Any], bool]) -> Misses:
    """Runs one simulation and counts its misses by class."""
    missed = np.empty(stream.keys.size, np.uint8)
    if not simulate(ffi.from_buffer("uint8_t[]", missed, require_writable=True)):
        raise EngramdError(f"no memory to simulate {stream.keys.size:,} look-ups: lower --samples")
    positions = np.flatnonzero(missed)
    classes = len(stream.classes)
    half = int(np.searchsorted(positions, stream.keys.size // 2))
    whole = np.bincount(stream.columns[positions], minlength=classes) / stream.rate
    second = np.bincount(stream.columns[positions[half:]], minlength=classes) / stream.rate
    return Misses(whole, second)

"""What share of the look-ups the hottest rows cover, from a sampled stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engramd.plan.stream import Column, Stream

SHARES = (0.0001, 0.001, 0.01, 0.1, 0.5)  # of the distinct rows
COVERED = (0.25, 0.5, 0.75, 0.9)  # of the look-ups


@dataclass(frozen=True)
class Coverage:
    """A group of look-ups. rows: distinct ones, estimated. covered[i]: share of the look-ups that the hottest SHARES[i]
    of those rows take. rows_for[i]: hottest rows that take COVERED[i] of the look-ups, 0 where even all of the rows
    that are looked up twice or more take less."""

    lookups: int
    rows: int
    covered: tuple[float, ...]
    rows_for: tuple[int, ...]


@dataclass(frozen=True)
class RowCounts:
    """Each sampled row once: its class (uint8 [n], index into Stream.classes) and its look-ups (int64 [n])."""

    columns: NDArray[np.uint8]
    counts: NDArray[np.int64]


def count_rows(stream: Stream) -> RowCounts:
    """Counts the rows of a sample. A row belongs to one class."""
    _, first, counts = np.unique(stream.keys, return_index=True, return_counts=True)
    return RowCounts(stream.columns[first], counts)


def coverage(stream: Stream, rows_seen: RowCounts, select: NDArray[np.bool_]) -> Coverage:
    """Of the classes selected (bool [classes]).

    The look-ups of the colder rows are counted and scaled up, and what the hottest take is the rest of the exact total:
    so it does not matter which of the few hottest rows fell into the sample.
    """
    lookups = int(stream.lookups[select].sum())
    counts = np.sort(rows_seen.counts[select[rows_seen.columns]])[::-1].astype(np.float64)
    rows = counts.size / stream.rate
    # covered_by[k] = share that the k hottest sampled rows stand for.
    rest = np.concatenate([[counts.sum()], counts.sum() - np.cumsum(counts)]) / stream.rate
    covered_by = np.clip(1.0 - rest / max(lookups, 1), 0.0, 1.0)
    places = [min(counts.size, round(share * counts.size)) for share in SHARES]
    rows_for = []
    for share in COVERED:
        place = int(np.searchsorted(covered_by, share))
        repeated = int((counts > 1).sum())
        rows_for.append(round(place / stream.rate) if place <= repeated else 0)
    return Coverage(lookups, round(rows), tuple(float(covered_by[place]) for place in places), tuple(rows_for))


def groups(stream: Stream, *attributes: str) -> list[tuple[tuple[int, ...], NDArray[np.bool_]]]:
    """The classes by equal values of some of their attributes, in order: (values, bool [classes])."""

    def values_of(column: Column) -> tuple[int, ...]:
        return tuple(int(getattr(column, name)) for name in attributes)

    found = sorted({values_of(column) for column in stream.classes})
    return [(values, np.array([values_of(column) == values for column in stream.classes])) for values in found]

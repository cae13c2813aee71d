"""Checks and conversions of the arrays that callers pass in: row ids and memory for rows."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int32] | NDArray[np.int64]
Rows = NDArray[np.uint8]
Layout = Literal["packed", "split"]

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)


class OutOfRangeId(Exception):
    """An id that int64 cannot hold. Never leaves this package: the table turns it into a RowIdError."""

    def __init__(self, position: int, row_id: int) -> None:
        super().__init__(position, row_id)
        self.position = position
        self.row_id = row_id


def as_ids(ids: ArrayLike, num_rows: int) -> Ids:
    """The ids as a C-contiguous int32 or int64 array of the same shape, copied only where it must be.

    TypeError where they are no integers (bool is none). OutOfRangeId where an unsigned id is outside the table.
    """
    array: NDArray[Any] = np.asarray(ids)
    dtype = array.dtype
    if dtype is not INT64 and dtype is not INT32:
        array = _convert(array, ids, num_rows)
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return array


def _convert(array: NDArray[Any], ids: ArrayLike, num_rows: int) -> NDArray[Any]:
    dtype = array.dtype
    if array.size == 0 and not isinstance(ids, np.ndarray):
        return array.astype(INT64)  # an empty list has no type of its own
    if dtype.kind not in "iu":
        raise TypeError(f"row ids must be integers (int32, int64), not {dtype}")
    if dtype == INT64:
        return array.view(INT64) if dtype.isnative else array.astype(INT64)
    if dtype == INT32 and dtype.isnative:
        return array.view(INT32)
    if dtype.kind == "u" and dtype.itemsize == 8:
        bad = array >= np.uint64(num_rows)
        if bad.any():
            position = int(bad.reshape(-1).argmax())
            raise OutOfRangeId(position, int(array.reshape(-1)[position]))
    return array.astype(INT64)


def check_out(out: object, shape: tuple[int, ...], what: str = "out") -> Rows:
    """`out` itself; ValueError where rows of that shape cannot be written into it as they are."""
    if not isinstance(out, np.ndarray):
        raise ValueError(f"{what} must be a numpy array, not {type(out).__name__}")
    if out.dtype != UINT8:
        raise ValueError(f"{what} must be uint8, not {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"{what} must have the shape {shape}, not {out.shape}")
    if not out.flags.c_contiguous:
        raise ValueError(f"{what} must be C-contiguous")
    if not out.flags.writeable:
        raise ValueError(f"{what} is read-only")
    return out


def check_split_out(out: object, values_shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> tuple[Rows, Rows]:
    """The two arrays of `out` in split layout."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise ValueError("out must be a pair of arrays (values, scales) in split layout")
    return check_out(out[0], values_shape, "out's values"), check_out(out[1], scales_shape, "out's scales")

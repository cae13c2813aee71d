"""LayerMap: a resident layer's rows, where the daemon holds them, mapped into this process read-only."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

import numpy as np

from ._native import ffi, lib
from .arrays import UINT8, Layout, Rows
from .context import Closeable
from .errors import EngramError
from .layer import LayerInfo
from .ring_session import RingSession


class LayerMap(Closeable):
    """All rows of one layer of one generation, as they lie in the daemon's memory. Made by Table.map().

    layout "packed": rows is uint8 [num_rows, row_bytes]. layout "split": values is uint8 [num_rows, value_bytes] and
    scales uint8 [num_rows, scale_bytes]. Which it is, the daemon's configuration says (`resident_layout`). All arrays
    are read-only views; nobody can change what they show, not even after a reload or the daemon's end: they stay rows
    of the generation that was mapped. While a map is open the daemon keeps the layer resident, and a reload that does
    not fit beside it is refused; so close it when it is not needed. A context manager that closes at its end.
    """

    def __init__(self, session: RingSession, info: LayerInfo, message: Any, memory: mmap.mmap) -> None:
        self._memory = memory
        # With the mapping itself, which arrays keep alive beyond this object.
        self._tell = weakref.finalize(memory, _unmap, session, info.handle)
        self.layer = info.layer
        self.name = info.name
        self.identity = info.identity
        self.generation = info.generation
        self.num_rows = int(message.rows)
        self.row_bytes = int(message.row_bytes)
        self.value_bytes = int(message.value_bytes)
        self.layout: Layout = "split" if message.row_layout == lib.ENGRAM_LAYOUT_SPLIT else "packed"
        self._scales_offset = int(message.scales_offset)

    def _view(self, offset: int, width: int) -> Rows:
        if self._memory.closed:
            raise EngramError(f"the map of {self.name} layer {self.layer} is closed")
        return np.frombuffer(self._memory, UINT8, self.num_rows * width, offset).reshape(self.num_rows, width)

    def _check_layout(self, layout: Layout, names: str) -> None:
        if self.layout != layout:
            raise EngramError(
                f"{self.name} layer {self.layer} lies in memory in {self.layout} layout, which has no {names}: give "
                f'the table resident_layout = "{layout}" in the daemon\'s configuration'
            )

    @property
    def rows(self) -> Rows:
        """uint8 [num_rows, row_bytes], read-only. Raises EngramError in split layout."""
        self._check_layout("packed", "rows")
        return self._view(0, self.row_bytes)

    @property
    def values(self) -> Rows:
        """uint8 [num_rows, value_bytes], read-only. Raises EngramError in packed layout."""
        self._check_layout("split", "values")
        return self._view(0, self.value_bytes)

    @property
    def scales(self) -> Rows:
        """uint8 [num_rows, row_bytes - value_bytes], read-only. Raises EngramError in packed layout."""
        self._check_layout("split", "scales")
        return self._view(self._scales_offset, self.row_bytes - self.value_bytes)

    @property
    def whole(self) -> Rows:
        """uint8 [bytes], read-only: the whole mapping, to be registered with a device. Rows begin at 0."""
        if self._memory.closed:
            raise EngramError(f"the map of {self.name} layer {self.layer} is closed")
        return np.frombuffer(self._memory, UINT8)

    @property
    def scales_offset(self) -> int:
        """Where scales begin in the mapping; 0 in packed layout."""
        return self._scales_offset

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return not self._memory.closed

    def close(self) -> None:
        """Unmaps the rows and tells the daemon. Raises BufferError, and stays open, while an array of it lives."""
        try:
            self._memory.close()
        except BufferError:
            raise BufferError(
                f"arrays of the map of {self.name} layer {self.layer} are still in use: drop them before close()"
            ) from None
        self._tell()


def _unmap(session: RingSession, handle: int) -> None:
    """Tells the daemon, where the session still lives. A session that has ended has said so for all its maps."""
    lib.engram_session_unmap(session.handle, handle, ffi.new("engram_error *"))


def map_layer(session: RingSession, info: LayerInfo, error: Any) -> LayerMap | int:
    """Maps a layer, or returns the status of a refusal with its sentence in `error`. Raises EngramError."""
    message = ffi.new("engram_map *")
    descriptor = ffi.new("int *")
    status: int = lib.engram_session_map(session.handle, info.handle, message, descriptor, error)
    if status:
        return status
    file = int(descriptor[0])
    try:
        if (message.rows, message.row_bytes, message.value_bytes) != (info.rows, info.row_bytes, info.value_bytes):
            raise EngramError(f"{info}: the daemon's memory has another geometry than its catalogue says")
        memory = mmap.mmap(file, message.bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as failure:
        _unmap(session, info.handle)
        raise EngramError(f"{info}: {message.bytes} bytes cannot be mapped: {failure.strerror}") from None
    finally:
        os.close(file)
    with contextlib.suppress(OSError):  # only a hint; reserved huge pages do not take it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return LayerMap(session, info, message, memory)

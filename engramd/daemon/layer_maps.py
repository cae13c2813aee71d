"""Resident layers that clients have mapped: who holds which, so that a reload knows what memory does not return.

A session asks with a message on its socket and is given a read-only descriptor of the layer's memory; it says when it
has unmapped it, and its end says so for all it held. A client that lies about this can keep a generation's memory
alive, nothing else: it can neither write nor shrink it. Event loop's thread only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engramd._engine import ffi, lib
from engramd.daemon import ring_messages
from engramd.daemon.engine import Engine
from engramd.errors import EngramdError

MAX_MAPS = 256  # of one session


class LayerMaps:
    """`answer` and `unmap` are told a session's number."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: dict[int, Counter[int]] = {}  # session: handle: maps

    def answer(self, session: int, handle: int) -> tuple[bytes, int | None]:
        """(engram_map message, descriptor for the caller to close, or None where it is a refusal)."""
        message = ffi.new("engram_map *")
        ring_messages.fill_header(message, lib.ENGRAM_KIND_MAP)
        message.handle = handle
        descriptor = None
        try:
            descriptor = self._take(session, handle, message)
            message.status = lib.ENGRAM_STATUS_OK
        except EngramdError as refusal:
            message.status = self._status_of(handle)
            ring_messages.fill_text(message, str(refusal))
        return bytes(ffi.buffer(message)), descriptor

    def _take(self, session: int, handle: int, message: Any) -> int:
        held = self._held.get(session, Counter())
        if held.total() >= MAX_MAPS:
            raise EngramdError(f"this session has {MAX_MAPS} maps, the limit: close some")
        memory, descriptor = self._engine.map_layer(handle)
        for field in ("row_layout", "rows", "row_bytes", "value_bytes", "scales_offset", "bytes"):
            setattr(message, field, getattr(memory, field))
        held[handle] += 1
        self._held[session] = held
        return descriptor

    def _status_of(self, handle: int) -> int:
        """Why a map was refused, as a status that a client acts upon."""
        if handle not in self._engine.by_handle:
            return int(lib.ENGRAM_STATUS_UNKNOWN_TABLE)
        served = any(layer.handle == handle for layer in self._engine.layers)
        return int(lib.ENGRAM_STATUS_BUSY if served else lib.ENGRAM_STATUS_STALE)

    def unmap(self, session: int, handle: int) -> bool:
        """Whether the session had the layer mapped; if so, once less now."""
        held = self._held.get(session, Counter())
        if held[handle] == 0:
            return False
        held[handle] -= 1
        self._engine.unmap_layer(handle)
        return True

    def forget(self, session: int) -> None:
        """The session has ended."""
        for handle, maps in self._held.pop(session, Counter()).items():
            for _ in range(maps):
                self._engine.unmap_layer(handle)

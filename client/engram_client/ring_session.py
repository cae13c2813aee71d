"""One ring session: the native handle, the layers it serves, and how native errors become Python's."""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

from ._native import ffi, lib
from .errors import Busy, DaemonLost, EngramError, PageCorrupt, ReadFailed, RequestTimeout, UnknownTable
from .layer import LayerInfo

#: Longest stay in one native call, so that Python can handle signals in between.
SLICE_MS = 100

TOTALS = ("requests", "failed_requests", "rows", "reply_bytes", "wait_ns", "copy_ns")


class _ThreadError(threading.local):
    """One native error struct a thread, since making one costs as much as a whole call."""

    def __init__(self) -> None:
        self.struct: Any = ffi.new("engram_error *")


thread_error = _ThreadError()


class RingSession:
    """A session with one daemon process. Never reconnects: the client makes a new one.

    The native session is freed with this object, except for what its unreleased tickets need: so a ticket may release
    itself in whatever order the garbage collector takes them.
    """

    __slots__ = ("__weakref__", "_is_open", "handle", "layers", "path")

    def __init__(
        self,
        path: str,
        *,
        arena_bytes: int = 0,
        spin_us: int | None = None,
        timeout: float,
        name: str | None = None,
        writable_arena: bool = False,
    ) -> None:
        self._is_open = False
        self.path = path
        if "\0" in path:
            raise ValueError(f"a socket path cannot contain a zero byte: {path!r}")
        # Stream slots cost a few KiB of the ring and nothing else until a GPU stream uses one.
        flags = lib.ENGRAM_CONNECT_STREAM_SLOTS | (lib.ENGRAM_CONNECT_WRITABLE_ARENA if writable_arena else 0)
        client_name = ffi.new("char[]", name.encode("utf-8", "replace")[:63]) if name is not None else ffi.NULL
        deadline = time.monotonic() + timeout
        error = ffi.new("engram_error *")
        while True:
            left_ms = max(1, int((deadline - time.monotonic()) * 1000))
            options = ffi.new(
                "engram_connect_options *",
                (arena_bytes, left_ms, -1 if spin_us is None else spin_us, client_name, flags, 0),
            )
            pointer = lib.engram_connect(path.encode("utf-8", "surrogateescape"), options, error)
            if pointer:
                break
            if error.status != lib.ENGRAM_CLIENT_AGAIN or time.monotonic() >= deadline:
                _raise_connect_error(path, error)
        self.handle = pointer
        self._is_open = True
        self.layers: dict[tuple[str, int], LayerInfo] = {}
        self._read_layers()

    def _read_layers(self) -> None:
        count = lib.engram_session_layers(self.handle, ffi.NULL, 0)
        records = ffi.new("engram_catalogue_record[]", max(count, 1))
        # The catalogue may have changed in between: what does not fit is left to the next refresh.
        count = min(count, lib.engram_session_layers(self.handle, records, count))
        layers = {}
        for record in records[0:count]:
            head_sizes = ffi.new("int64_t[]", max(record.head_count, 1))
            held = lib.engram_session_head_sizes(self.handle, record.handle, head_sizes, record.head_count)
            if held != record.head_count:
                continue
            info = LayerInfo(
                name=ffi.string(record.name).decode("utf-8", "replace"),
                layer=record.layer,
                rows=record.rows,
                row_bytes=record.row_bytes,
                value_bytes=record.value_bytes,
                generation=record.generation,
                identity=bytes(ffi.buffer(record.identity)).hex(),
                head_sizes=tuple(head_sizes[0:held]),
                handle=record.handle,
            )
            layers[info.name, info.layer] = info
        self.layers = layers

    def refresh(self) -> None:
        """Reads the daemon's catalogue again."""
        error = thread_error.struct
        status = lib.engram_session_refresh(self.handle, error)
        if status:
            raise_status(self, status, error)
        self._read_layers()

    @property
    def ticket_rows(self) -> int:
        """Most rows of a ticket, whichever of the served layers it is for."""
        largest = max((info.row_bytes for info in self.layers.values()), default=1)
        return int(lib.engram_session_ticket_rows(self.handle, largest))

    def usage(self) -> dict[str, int]:
        """Tickets and bytes in use: open_tickets, zombie_tickets, arena_bytes, ids_bytes."""
        usage = ffi.new("engram_session_usage *")
        lib.engram_session_read_usage(self.handle, usage)
        return {
            "open_tickets": usage.open_tickets,
            "zombie_tickets": usage.zombie_tickets,
            "arena_bytes": usage.arena_bytes,
            "ids_bytes": usage.ids_bytes,
        }

    def totals(self) -> dict[str, int]:
        """The fields of engram_session_totals: what this session has done so far."""
        totals = ffi.new("engram_session_totals *")
        lib.engram_session_read_totals(self.handle, totals)
        return {name: int(getattr(totals, name)) for name in TOTALS}

    def close(self) -> None:
        """Hangs up; the memory stays until the last reference is gone."""
        if self._is_open:
            lib.engram_session_close(self.handle)

    def __del__(self) -> None:
        if self._is_open:
            self._is_open = False
            lib.engram_session_free(self.handle)


def _text(error: Any) -> str:
    return bytes(ffi.string(error.text)).decode("utf-8", "replace")


def _raise_connect_error(path: str, error: Any) -> NoReturn:
    text = f"cannot connect to the daemon at {path}: {_text(error)}"
    status = error.status
    if status in (lib.ENGRAM_STATUS_LOST, lib.ENGRAM_STATUS_STOPPING, lib.ENGRAM_STATUS_TIMEOUT):
        raise DaemonLost(text)
    if status == lib.ENGRAM_STATUS_BUSY:
        raise Busy(text)
    if status == lib.ENGRAM_CLIENT_ARGUMENT:
        raise ValueError(text)
    raise EngramError(text)


def is_loss(status: int) -> bool:
    """Whether the status says that this session answers no more requests."""
    return status in (lib.ENGRAM_STATUS_LOST, lib.ENGRAM_STATUS_STOPPING)


def raise_status(session: RingSession, status: int, error: Any, layer: LayerInfo | None = None) -> NoReturn:
    """Raises the error for a native status. RowIdError is the table's own business."""
    text = f"{layer} at {session.path}: {_text(error)}" if layer is not None else f"{session.path}: {_text(error)}"
    if is_loss(status):
        raise DaemonLost(f"lost the daemon at {session.path}: {_text(error)}")
    if status == lib.ENGRAM_STATUS_PAGE_CORRUPT:
        raise PageCorrupt(text, error.page, error.row_id)
    if status == lib.ENGRAM_STATUS_READ_FAILED:
        raise ReadFailed(text, error.page, error.row_id)
    if status == lib.ENGRAM_STATUS_BUSY:
        raise Busy(text)
    if status == lib.ENGRAM_STATUS_TIMEOUT:
        raise RequestTimeout(text)
    if status in (lib.ENGRAM_STATUS_UNKNOWN_TABLE, lib.ENGRAM_STATUS_STALE):
        raise UnknownTable(text)
    if status == lib.ENGRAM_CLIENT_ARGUMENT:
        raise ValueError(text)
    raise EngramError(text)

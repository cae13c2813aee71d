"""RingTable and RingTicket: requests through the ring. submit, wait and release are the hot path of small batches."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from ._native import ffi, lib
from .arguments import deadline_of
from .arrays import UINT8, Ids, Layout, Rows
from .errors import EngramError, RequestTimeout
from .layer import LayerInfo, check_successor
from .layer_map import LayerMap, map_layer
from .ring_session import SLICE_MS, RingSession, is_loss, raise_status, thread_error
from .table import OnFull, Table, Ticket, check_waiting
from .view_lifetime import release_with_last_view

if TYPE_CHECKING:
    from .ring_client import RingClient

_submit = lib.engram_submit
_wait = lib.engram_wait
_release = lib.engram_release
_from_buffer = ffi.from_buffer
_buffer = ffi.buffer
_cast = ffi.cast
_frombuffer = np.frombuffer

# A table that is reloaded faster than a request takes is a mistake of its operator.
_MAX_RELOADS = 8
_EMPTY = memoryview(b"")
# All views of a ticket must have the same base, also where two threads wait for it first.
_first_wait_lock = threading.Lock()


def _slice_ms(deadline: float | None) -> int:
    """Time of the next native call, rounded up so that 0 means that the deadline has passed."""
    if deadline is None:
        return SLICE_MS
    return max(0, min(SLICE_MS, -int((time.monotonic() - deadline) * 1000 // 1)))


class _Binding:
    """A layer in one session: valid as long as that is the client's session and the layer is not reloaded."""

    __slots__ = ("handle", "info", "layer", "session")

    def __init__(self, session: RingSession, info: LayerInfo) -> None:
        self.session = session
        self.handle = session.handle
        self.info = info
        self.layer = ffi.new("engram_layer *", (info.handle, info.row_bytes, info.value_bytes, 0, info.rows))


class RingTicket(Ticket):
    """See Ticket. `_number` is -1 once released (or where there was nothing to send)."""

    __slots__ = ("_binding", "_buffer", "_bytes", "_handle", "_memory", "_number", "_shape", "_split", "_table")

    def __init__(
        self, table: RingTable, binding: _Binding, number: int, shape: tuple[int, ...], reply_bytes: int, is_split: bool
    ) -> None:
        self._table = table
        self._binding = binding
        self._handle = binding.handle
        self._number = number
        self._shape = shape
        self._bytes = reply_bytes
        self._split = is_split
        # The cffi buffer is the base of every view, and its death is the views' death. The memoryview makes them
        # read-only for good: setflags(write=True) fails.
        self._buffer: Any = None
        self._memory: Any = None if reply_bytes else _EMPTY

    def wait(self, timeout: float | None = None) -> Rows | tuple[Rows, Rows]:
        memory = self._memory
        if memory is None:
            error = thread_error.struct
            deadline = deadline_of(timeout)
            pointer = _wait(self._handle, self._number, _slice_ms(deadline), error)
            if not pointer:
                pointer = self._wait_on(deadline, timeout, error)
            memory = self._take_rows(pointer)
        if self._split:
            return self._split_views(memory)
        return _frombuffer(memory, UINT8).reshape(self._shape)

    def _take_rows(self, pointer: Any) -> memoryview:
        with _first_wait_lock:
            if self._memory is None:
                self._buffer = _buffer(pointer, self._bytes)
                self._memory = memoryview(self._buffer).toreadonly()
            memory: memoryview = self._memory
            return memory

    def wait_address(self, timeout: float | None = None) -> int:
        """As wait(), but the address of the reply (0 where it is empty): for those who hand it to a device."""
        if self._number < 0:
            return 0
        error = thread_error.struct
        deadline = deadline_of(timeout)
        pointer = _wait(self._handle, self._number, _slice_ms(deadline), error)
        if not pointer:
            pointer = self._wait_on(deadline, timeout, error)
        return int(_cast("uintptr_t", pointer))

    def _split_views(self, memory: memoryview) -> tuple[Rows, Rows]:
        values_shape, scales_shape = self._table._split_shapes(self._shape[:-1], "split")
        rows = _frombuffer(memory, UINT8)
        cut = int(np.prod(values_shape))
        return rows[:cut].reshape(values_shape), rows[cut:].reshape(scales_shape)

    def _wait_on(self, deadline: float | None, timeout: float | None, error: Any) -> Any:
        """Goes on after a first wait that gave nothing: longer, or once more after a reload; else raises."""
        reloads = 0
        while True:
            status = error.status
            if self._number < 0:
                raise EngramError(f"{self._binding.info}: the ticket is released")
            if status == lib.ENGRAM_STATUS_TIMEOUT or status == lib.ENGRAM_CLIENT_AGAIN:
                if deadline is not None and time.monotonic() >= deadline:
                    raise RequestTimeout(
                        f"{self._binding.info} at {self._binding.session.path}: no reply within {timeout} s"
                    )
            elif status == lib.ENGRAM_STATUS_STALE and reloads < _MAX_RELOADS:
                reloads += 1
                self._resubmit()
            else:
                self._table._fail(self._binding, status, error)
            pointer = _wait(self._handle, self._number, _slice_ms(deadline), error)
            if pointer:
                return pointer

    def _resubmit(self) -> None:
        table = self._table
        binding = table._bind_again(self._binding)
        if binding.session is not self._binding.session:
            # Another thread has found the session lost meanwhile; so does this ticket.
            error = thread_error.struct
            if lib.engram_session_check(self._handle, error):
                table._fail(self._binding, error.status, error)
            raise EngramError(f"{self._binding.info}: the ticket's session was replaced")
        error = thread_error.struct
        status = lib.engram_resubmit(self._handle, self._number, binding.layer, error)
        if status:
            table._fail(self._binding, status, error)
        self._binding = binding

    def release(self) -> None:
        number = self._number
        if number >= 0:
            self._number = -1
            _release(self._handle, number)
        self._memory = self._buffer = None

    def __del__(self) -> None:
        number = self._number
        if number < 0:
            return
        self._number = -1
        if self._buffer is None:
            _release(self._handle, number)
        else:
            release_with_last_view(self._buffer, self._handle, number)


class RingTable(Table):
    """See Table."""

    def __init__(self, client: RingClient, info: LayerInfo, pinned_identity: str | None) -> None:
        self._client = client
        self._pinned_identity = pinned_identity
        self._set_info(info)
        self._binding: _Binding | None = None

    # ---- which layer of which session

    def _bind(self) -> _Binding:
        """The layer in the client's session; looks it up again in a new session."""
        session = self._client.connected()
        binding = self._binding
        if binding is not None and binding.session is session:
            return binding
        return self._look_up(session)

    def _bind_again(self, stale: _Binding) -> _Binding:
        """The layer after the daemon has said that this binding's generation is served no more."""
        binding = self._binding
        if binding is not None and binding is not stale:
            return binding
        session = stale.session
        try:
            session.refresh()
        except EngramError:
            self._client.forget(session)
            raise
        return self._look_up(session)

    def _look_up(self, session: RingSession) -> _Binding:
        old = self._info
        found = session.layers.get((old.name, old.layer))
        info = check_successor(old, found, self._pinned_identity, session.path)
        if info != old:
            self._set_info(info)
        binding = self._binding = _Binding(session, info)
        return binding

    def _fail(self, binding: _Binding, status: int, error: Any) -> NoReturn:
        if status == lib.ENGRAM_STATUS_ROW_ID:
            raise self._row_id_error(error.position, error.row_id)
        if is_loss(status) or status == lib.ENGRAM_CLIENT_CLOSED:
            self._client.forget(binding.session)
        raise_status(binding.session, status, error, binding.info)

    def map(self) -> LayerMap:
        error = thread_error.struct
        binding = self._bind()
        for _ in range(_MAX_RELOADS):
            mapped = map_layer(binding.session, binding.info, error)
            if isinstance(mapped, LayerMap):
                return mapped
            if mapped != lib.ENGRAM_STATUS_STALE:
                self._fail(binding, mapped, error)
            binding = self._bind_again(binding)
        self._fail(binding, lib.ENGRAM_STATUS_STALE, error)

    # ---- requests

    def submit(
        self, ids: ArrayLike, *, layout: Layout = "packed", on_full: OnFull = "wait", timeout: float | None = None
    ) -> RingTicket:
        if on_full != "wait" or timeout is not None:
            check_waiting(on_full, timeout)
        array = self._as_ids(ids)
        client = self._client
        binding = self._binding
        if binding is None or binding.session is not client.session:
            binding = self._bind()
        is_split = layout != "packed"
        if is_split:
            self._split_shapes((), layout)
        count = array.size
        shape = (*array.shape, self.row_bytes)
        if count == 0:
            return RingTicket(self, binding, -1, shape, 0, is_split)
        if count > client.max_ticket_rows:
            raise self._too_many_rows(count, client.max_ticket_rows)
        error = thread_error.struct
        # Without room this first try says so at once; the thorough way follows.
        number = _submit(binding.handle, binding.layer, _from_buffer(array), array.itemsize, count, is_split, 0, error)
        if number < 0:
            number = self._submit_on(binding, array, is_split, on_full, timeout, -number, error)
        return RingTicket(self, binding, number, shape, count * self.row_bytes, is_split)

    def _submit_on(
        self, binding: _Binding, ids: Ids, is_split: bool, on_full: str, timeout: float | None, status: int, error: Any
    ) -> int:
        """Waits for room after a first try without success; else raises."""
        if status != lib.ENGRAM_STATUS_BUSY or on_full == "busy":
            self._fail(binding, status, error)
        deadline = deadline_of(timeout)
        while True:
            # At least a look at who holds the room: 0 would mean "busy at once".
            wait_ms = max(1, _slice_ms(deadline))
            number: int = _submit(
                binding.handle, binding.layer, _from_buffer(ids), ids.itemsize, ids.size, is_split, wait_ms, error
            )
            if number >= 0:
                return number
            status = -number
            is_over = deadline is not None and time.monotonic() >= deadline
            if is_over or status not in (lib.ENGRAM_STATUS_TIMEOUT, lib.ENGRAM_CLIENT_AGAIN):
                self._fail(binding, lib.ENGRAM_STATUS_TIMEOUT if status == lib.ENGRAM_CLIENT_AGAIN else status, error)

    def _fetch(self, ids: Ids, rows: Rows, scales: Rows | None, timeout: float | None) -> None:
        rows_pointer = _from_buffer(rows, require_writable=True)
        scales_pointer = ffi.NULL if scales is None else _from_buffer(scales, require_writable=True)
        layout = lib.ENGRAM_LAYOUT_PACKED if scales is None else lib.ENGRAM_LAYOUT_SPLIT
        self._run(ids, rows_pointer, scales_pointer, layout, lib.ENGRAM_OPERATION_FETCH, timeout)

    def _prefetch(self, ids: Ids, timeout: float | None) -> None:
        self._run(ids, ffi.NULL, ffi.NULL, lib.ENGRAM_LAYOUT_PACKED, lib.ENGRAM_OPERATION_PREFETCH, timeout)

    def _run(self, ids: Ids, rows: Any, scales: Any, layout: int, operation: int, timeout: float | None) -> None:
        deadline = deadline_of(timeout)
        error = thread_error.struct
        ids_pointer = _from_buffer(ids)
        reloads = 0
        binding = self._bind()
        while True:
            fetch = ffi.new(
                "engram_fetch *",
                (binding.layer, ids_pointer, rows, scales, ids.size, ids.itemsize, layout, operation),
            )
            status = self._run_one(binding, fetch, deadline, error)
            if status == 0:
                return
            if status == lib.ENGRAM_STATUS_STALE and reloads < _MAX_RELOADS:
                # From the start: one reply comes from one generation.
                reloads += 1
                binding = self._bind_again(binding)
                continue
            if status == lib.ENGRAM_STATUS_TIMEOUT:
                raise RequestTimeout(f"{binding.info} at {binding.session.path}: no reply within {timeout} s")
            self._fail(binding, status, error)

    @staticmethod
    def _run_one(binding: _Binding, fetch: Any, deadline: float | None, error: Any) -> int:
        """Runs one native fetch to its end or to the deadline, letting Python handle signals in between."""
        handle = binding.handle
        try:
            while True:
                status: int = lib.engram_fetch_run(handle, fetch, _slice_ms(deadline), error)
                if status not in (lib.ENGRAM_STATUS_TIMEOUT, lib.ENGRAM_CLIENT_AGAIN):
                    return status
                if deadline is not None and time.monotonic() >= deadline:
                    lib.engram_fetch_cancel(handle, fetch)
                    return int(lib.ENGRAM_STATUS_TIMEOUT)
        except BaseException:
            # Parts in flight may still be written to the arena; their tickets must not be lost.
            lib.engram_fetch_cancel(handle, fetch)
            raise

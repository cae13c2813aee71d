"""`fetch` and `prefetch` over ZeroMQ: handed to the engine by the event loop, answered when the engine says so.

No thread waits for a request, so as many are in flight as OPEN_LIMIT and the memory allow. The rows of a reply lie
where the engine put them until libzmq has sent or copied them. Event loop's thread only.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engramd._engine import ffi, lib
from engramd.daemon import messages
from engramd.daemon.control_memory import ByteBudget
from engramd.daemon.control_peer import Peer
from engramd.daemon.engine import ERROR_CLASSES, Completion, Engine, ServedLayer
from engramd.daemon.messages import MAX_BULK_BYTES, Request, RequestError

REQUEST_TIMEOUT_S = 30.0
OPEN_LIMIT = 256  # requests in the engine
COMPLETIONS_A_TURN = 64
SPLIT_REQUESTS_LIMIT = 256  # unfinished split requests that are remembered
_LAYOUTS = {"packed": lib.ENGRAM_LAYOUT_PACKED, "split": lib.ENGRAM_LAYOUT_SPLIT}


@dataclass(slots=True)
class _Open:
    """A request in the engine. Its bytes stay reserved until its memory is free, also where the client has been told
    that its time is over."""

    peer: Peer
    request: Request
    layer: ServedLayer
    reserved_bytes: int
    deadline: float
    is_answered: bool = False


class Fetches:
    """clock: seconds, never going back. `descriptor` turns readable when `collect` has something to do."""

    def __init__(self, engine: Engine, budget: ByteBudget, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._budget = budget
        self._clock = clock
        self._layers: dict[tuple[str, int], ServedLayer] = {}
        self._native = ffi.new("engram_request *")  # filled anew for each request; the engine copies it
        self._open: dict[int, _Open] = {}  # by tag; the oldest first, which is also the order of deadlines
        self._tags = itertools.count(1)
        self._request_ids = itertools.count(1)
        self._split_requests: OrderedDict[tuple[tuple[int, bytes], int], int] = OrderedDict()
        self.descriptor = engine.completion_descriptor
        self.refresh()

    @property
    def is_idle(self) -> bool:
        """Whether every request that the engine was given has ended."""
        return not self._open

    def refresh(self) -> None:
        """Takes the engine's layers as they are served now."""
        self._layers = {(layer.table.name, layer.layer): layer for layer in self._engine.layers}

    def fetch(self, peer: Peer, request: Request, ids: bytes) -> None:
        """Begins a fetch. Raises RequestError."""
        layer = self._find_layer(request)
        count = self._fill_native(peer, request, layer, ids, lib.ENGRAM_OPERATION_FETCH)
        self._native.layout = request.choice("layout", _LAYOUTS, "packed")
        row_bytes = layer.table.manifest.row_bytes
        reply_bytes = count * row_bytes
        if reply_bytes > MAX_BULK_BYTES:
            raise RequestError(
                "EngramError",
                f"fetch: {count} rows of {row_bytes} bytes are more than the {MAX_BULK_BYTES} bytes of one reply; "
                f"ask for at most {MAX_BULK_BYTES // row_bytes} rows at once",
            )
        if count == 0:
            peer.send([messages.reply_ok(request), b""])
        else:
            self._submit(peer, request, layer, ids, len(ids) + reply_bytes)

    def prefetch(self, peer: Peer, request: Request, ids: bytes) -> None:
        """Begins a prefetch. Raises RequestError."""
        layer = self._find_layer(request)
        if self._fill_native(peer, request, layer, ids, lib.ENGRAM_OPERATION_PREFETCH) == 0:
            peer.send([messages.reply_ok(request)])
        else:
            self._submit(peer, request, layer, ids, len(ids))

    def collect(self) -> None:
        """Answers the requests that have ended, at most COMPLETIONS_A_TURN."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return
        for _ in range(COMPLETIONS_A_TURN):
            completion = self._engine.next_completion()
            if completion is None:
                return
            self._finish(self._open.pop(completion.tag), completion)
        # The count was taken with the first read: what is left must make the descriptor readable again.
        os.eventfd_write(self.descriptor, 1)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do (the clock's time), or None."""
        return next((one.deadline for one in self._open.values() if not one.is_answered), None)

    def expire(self) -> None:
        """Answers the requests whose time is over. Their rows are dropped when they come."""
        if not self._open:
            return
        now = self._clock()
        for one in self._open.values():
            if one.deadline > now:
                return
            if not one.is_answered:
                one.is_answered = True
                one.peer.send([messages.reply_error(one.request, failure_of(lib.ENGRAM_STATUS_TIMEOUT, one.layer))])

    def _submit(self, peer: Peer, request: Request, layer: ServedLayer, ids: bytes, reserved_bytes: int) -> None:
        """Hands the native request to the engine. Raises RequestError, with nothing reserved."""
        if len(self._open) >= OPEN_LIMIT:
            raise RequestError("Busy", f"all clients' fetches reach {OPEN_LIMIT} requests, the limit")
        self._budget.take(peer.key, peer.connection, reserved_bytes)
        tag = next(self._tags)
        status, completion = self._engine.submit(self._native, ids, tag)
        if status != 0:
            self._budget.give_back(peer.key, reserved_bytes)
            raise failure_of(status, layer)
        one = _Open(peer, request, layer, reserved_bytes, self._clock() + REQUEST_TIMEOUT_S)
        if completion is not None:
            self._finish(one, completion)
        else:
            self._open[tag] = one

    def _finish(self, one: _Open, completion: Completion) -> None:
        if one.is_answered:
            self._budget.give_back(one.peer.key, one.reserved_bytes)
            return
        if completion.failure.status != lib.ENGRAM_STATUS_OK:
            frames = [messages.reply_error(one.request, error_of(completion.failure, one.layer))]
        elif completion.rows is None:
            frames = [messages.reply_ok(one.request)]
        else:
            frames = [messages.reply_ok(one.request), completion.rows]
        self._budget.give_back_when_sent(one.peer.send(frames), one.peer.key, one.reserved_bytes)

    def _find_layer(self, request: Request) -> ServedLayer:
        """The layer that a request names. Raises RequestError UnknownTable or TableMismatch."""
        name, number = request.text("table"), request.integer("layer", 0, (1 << 31) - 1)
        layer = self._layers.get((name, number))
        if layer is None:
            served = ", ".join(f"{layer.table.name} layer {layer.layer}" for layer in self._engine.layers[:16])
            raise RequestError(
                "UnknownTable", f"no table {name[:127]!r} with layer {number} is served; there is: {served}"
            )
        identity = request.text_or_none("identity")
        if identity is not None and identity != layer.table.manifest.identity:
            raise RequestError(
                "TableMismatch",
                f"table {name} layer {number} has identity {layer.table.manifest.identity}, not {identity[:64]!r}",
            )
        return layer

    def _fill_native(self, peer: Peer, request: Request, layer: ServedLayer, ids: bytes, operation: int) -> int:
        """Fills in the native request, with packed layout; returns the number of rows. Raises RequestError."""
        width = request.one_of("width", (4, 8))
        if len(ids) % width:
            raise RequestError(
                "EngramError",
                f"{request.verb}: {len(ids)} bytes of ids of width {width}, which does not divide them",
            )
        count = len(ids) // width
        parts = request.integer("parts", 1, 1 << 31, default=1)
        native = self._native
        native.operation = operation
        native.handle = layer.handle
        native.layout = lib.ENGRAM_LAYOUT_PACKED
        native.row_count = count
        native.id_bytes = width
        native.part_count = parts
        native.part_index = request.integer("part", 0, parts - 1, default=0)
        native.total_rows = request.integer("total", count, 1 << 62, default=count)
        native.request_id = self._request_id(peer, request, parts)
        return count

    def _request_id(self, peer: Peer, request: Request, parts: int) -> int:
        """A number of the daemon's own for the request, equal for the parts of one split request of one client."""
        if parts == 1:
            return next(self._request_ids)
        key = (peer.key, request.integer("request", 0, (1 << 64) - 1))
        number = self._split_requests.pop(key, None) or next(self._request_ids)
        self._split_requests[key] = number
        if len(self._split_requests) > SPLIT_REQUESTS_LIMIT:
            self._split_requests.popitem(last=False)
        return number


def failure_of(status: int, layer: ServedLayer) -> RequestError:
    """The error that a status without details stands for."""
    texts = {
        lib.ENGRAM_STATUS_BUSY: "a limit of the daemon is reached",
        lib.ENGRAM_STATUS_TIMEOUT: f"not served within {REQUEST_TIMEOUT_S:g} s",
        lib.ENGRAM_STATUS_STOPPING: "the daemon is stopping",
        lib.ENGRAM_STATUS_STALE: "this generation is no longer served",
    }
    kind = ERROR_CLASSES.get(status, "EngramError")
    return RequestError(kind, f"{_name(layer)}: {texts.get(status, f'refused with status {status}')}")


def error_of(failure: Any, layer: ServedLayer) -> RequestError:
    """The error that an engram_failure stands for."""
    where = _name(layer)
    kind = ERROR_CLASSES.get(failure.status, "EngramError")
    if failure.status == lib.ENGRAM_STATUS_ROW_ID:
        text = (
            f"row id {failure.row_id} at position {failure.position} is outside {where}: "
            f"ids are -1 (zeros) or 0 .. {layer.rows - 1} ({layer.rows} rows)"
        )
        return RequestError(kind, text, position=failure.position, row_id=failure.row_id)
    if failure.status == lib.ENGRAM_STATUS_PAGE_CORRUPT:
        text = f"{where}: row {failure.row_id} in page {failure.page} does not match its checksum"
        return RequestError(kind, text, page=failure.page, row_id=failure.row_id)
    if failure.status == lib.ENGRAM_STATUS_READ_FAILED:
        number = abs(failure.error_number)
        text = f"{where}: page {failure.page} (row {failure.row_id}) cannot be read: {os.strerror(number)}"
        return RequestError(kind, text, page=failure.page, row_id=failure.row_id, errno=number)
    return failure_of(failure.status, layer)


def _name(layer: ServedLayer) -> str:
    return f"table {layer.table.name} layer {layer.layer}"

"""ControlTable and ControlTicket: rows over the control socket, in private memory."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ._native import ffi, lib
from .arguments import deadline_of
from .arrays import UINT8, Ids, Layout, Rows
from .control import ControlRequest
from .errors import DaemonLost, EngramError, RequestTimeout, TableMismatch
from .layer import LayerInfo, check_successor
from .layer_map import LayerMap
from .table import OnFull, Table, Ticket, check_waiting

if TYPE_CHECKING:
    from .control_client import ControlClient

DEPTH = 3  # parts of one fetch in flight
_MAX_RELOADS = 8
_request_numbers = itertools.count(1)


class ControlTicket(Ticket):
    """See Ticket. Its rows are private memory, so views stay valid after release."""

    __slots__ = ("_count", "_request", "_rows", "_shape", "_split", "_table")

    def __init__(
        self, table: ControlTable, request: ControlRequest | None, shape: tuple[int, ...], is_split: bool
    ) -> None:
        self._table = table
        self._request = request
        self._shape = shape
        self._split = is_split
        self._rows: memoryview | None = memoryview(b"") if request is None else None
        self._count = int(np.prod(shape[:-1]))

    def wait(self, timeout: float | None = None) -> Rows | tuple[Rows, Rows]:
        rows = self._rows
        if rows is None:
            if self._request is None:
                raise EngramError(f"{self._table._info}: the ticket is released")
            rows = self._rows = self._table._finish(self._request, self._count, timeout)
            self._table._client.count(requests=1)
        array = np.frombuffer(rows, UINT8)
        if not self._split:
            return array.reshape(self._shape)
        values_shape, scales_shape = self._table._split_shapes(self._shape[:-1], "split")
        cut = int(np.prod(values_shape))
        return array[:cut].reshape(values_shape), array[cut:].reshape(scales_shape)

    def release(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.drop()
        self._rows = None


class ControlTable(Table):
    """See Table."""

    def __init__(self, client: ControlClient, info: LayerInfo, pinned_identity: str | None) -> None:
        self._client = client
        self._pinned_identity = pinned_identity
        self._set_info(info)

    def map(self) -> LayerMap:
        raise EngramError(f"{self._info}: a map needs shared memory: connect to the daemon's socket path")

    def submit(
        self, ids: ArrayLike, *, layout: Layout = "packed", on_full: OnFull = "wait", timeout: float | None = None
    ) -> ControlTicket:
        """As Table.submit; there is always room here, up to this process's limit of open files (Busy)."""
        array = self._as_ids(ids)
        is_split = layout != "packed"
        if is_split:
            self._split_shapes((), layout)
        check_waiting(on_full, timeout)
        limit = self._client.max_ticket_rows
        if array.size > limit:
            raise self._too_many_rows(array.size, limit)
        shape = (*array.shape, self.row_bytes)
        if array.size == 0:
            return ControlTicket(self, None, shape, is_split)
        # The caller may change the array as soon as this returns, hence the copy.
        request = self._client.channel.start(
            "fetch", self._fields(array, layout=layout, total=array.size), array.tobytes()
        )
        return ControlTicket(self, request, shape, is_split)

    def _fields(self, ids: Ids, **fields: Any) -> dict[str, Any]:
        # The identity makes sure that no reload mixes two contents in one reply.
        info = self._info
        return {
            "table": info.name,
            "layer": info.layer,
            "identity": info.identity,
            "width": ids.itemsize,
            **fields,
        }

    def _finish(self, request: ControlRequest, count: int, timeout: float | None) -> memoryview:
        client = self._client
        began_ns = time.monotonic_ns()
        try:
            rows = request.finish(timeout)[1]
        except EngramError as error:
            if not isinstance(error, DaemonLost | RequestTimeout):
                client.count(failed_requests=1)
            raise
        finally:
            client.count(wait_ns=time.monotonic_ns() - began_ns)
        expected = count * self.row_bytes
        if rows is None or rows.nbytes != expected:
            got = "no rows" if rows is None else f"{rows.nbytes} bytes"
            raise EngramError(f"{self._info} at {self._client.target}: the reply has {got} instead of {expected} bytes")
        client.count(rows=count, reply_bytes=expected)
        return rows

    def _fetch(self, ids: Ids, rows: Rows, scales: Rows | None, timeout: float | None) -> None:
        deadline = deadline_of(timeout)
        self._over_reloads(lambda: self._fetch_once(ids, rows, scales, deadline))

    def _prefetch(self, ids: Ids, timeout: float | None) -> None:
        deadline = deadline_of(timeout)
        self._over_reloads(lambda: self._prefetch_once(ids, deadline))

    def _over_reloads(self, request: Any) -> None:
        """Makes a request, again where the table was reloaded and may be followed."""
        for _ in range(_MAX_RELOADS):
            try:
                return request()  # type: ignore[no-any-return]
            except TableMismatch:
                if self._pinned_identity is not None:
                    raise
                self._follow()
        request()

    def _follow(self) -> None:
        old = self._info
        layers = {(info.name, info.layer): info for info in self._client.layers()}
        found = layers.get((old.name, old.layer))
        self._set_info(check_successor(old, found, self._pinned_identity, self._client.target))

    def _parts(self, ids: Ids) -> tuple[Ids, int]:
        """The flat ids and the rows of one part. All ids are looked at before the first of several parts leaves."""
        flat = ids.reshape(-1)
        limit = self._client.max_ticket_rows
        if flat.size > limit:
            bad = lib.engram_find_bad_id(ffi.from_buffer(flat), flat.itemsize, flat.size, self.num_rows)
            if bad >= 0:
                raise self._row_id_error(bad, int(flat[bad]))
        return flat, limit

    def _fetch_once(self, ids: Ids, rows: Rows, scales: Rows | None, deadline: float | None) -> None:
        flat, part_rows = self._parts(ids)
        values = rows.reshape(flat.size, -1)
        scale_rows = None if scales is None else scales.reshape(flat.size, -1)
        layout = "packed" if scales is None else "split"
        in_flight: deque[tuple[int, int, ControlRequest]] = deque()
        try:
            for begin, request in self._requests("fetch", flat, part_rows, layout=layout):
                in_flight.append((begin, min(part_rows, flat.size - begin), request))
                if len(in_flight) == DEPTH:
                    self._copy_out(in_flight, values, scale_rows, deadline)
            while in_flight:
                self._copy_out(in_flight, values, scale_rows, deadline)
            self._client.count(requests=1)
        finally:
            for _, _, request in in_flight:
                request.drop()

    def _prefetch_once(self, ids: Ids, deadline: float | None) -> None:
        flat, part_rows = self._parts(ids)
        for _, request in self._requests("prefetch", flat, part_rows):
            try:
                request.finish(self._left(deadline))
            finally:
                request.drop()

    def _requests(self, verb: str, flat: Ids, part_rows: int, **fields: Any) -> Any:
        """Sends one part for each step: yields (its first row, the request)."""
        parts = -(-flat.size // part_rows)
        number = next(_request_numbers)
        for part in range(parts):
            begin = part * part_rows
            ids = flat[begin : begin + part_rows]
            split = {"request": number, "part": part, "parts": parts, "total": flat.size} if parts > 1 else {}
            yield begin, self._client.channel.start(verb, self._fields(flat, **fields, **split), ids.tobytes())

    def _copy_out(
        self,
        in_flight: deque[tuple[int, int, ControlRequest]],
        values: Rows,
        scales: Rows | None,
        deadline: float | None,
    ) -> None:
        begin, count, request = in_flight[0]
        reply = np.frombuffer(self._finish(request, count, self._left(deadline)), UINT8)
        in_flight.popleft()
        began_ns = time.monotonic_ns()
        if scales is None:
            values[begin : begin + count] = reply.reshape(count, -1)
        else:
            cut = count * values.shape[1]
            values[begin : begin + count] = reply[:cut].reshape(count, -1)
            scales[begin : begin + count] = reply[cut:].reshape(count, -1)
        self._client.count(copy_ns=time.monotonic_ns() - began_ns)

    @staticmethod
    def _left(deadline: float | None) -> float | None:
        if deadline is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            raise RequestTimeout("no reply in time")
        return left

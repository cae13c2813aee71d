"""DeviceTable: rows of a table into GPU memory, one copy per contiguous piece of a reply (host wait).

The host waits for the daemon's reply and then enqueues the copy; it never waits for the copy itself. A reply's ticket
is released once its copy is done, which the next calls notice, so one batch's copy overlaps the next batch's gather.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from .._native import ffi
from ..arrays import Ids, Layout
from ..errors import Busy, EngramError
from ..ring_table import RingTable, RingTicket
from ..table import Table
from .buffers import device_array, is_device_array, output_address, stream_handle
from .driver import Driver, GpuError, open_driver
from .registration import Registration, registration_of
from .stream_lane import StreamLane

#: Which of a row of ids one rank asks for: a slice (its step may be more than 1) or a list of column numbers.
Columns = slice | Sequence[int]


@dataclass
class Timing:
    """Where the host's time went, summed over calls: seconds and number of batches.

    ids_wait_s is the wait for ids in device memory, which includes everything that was queued on their stream before;
    store_wait_s the wait for the daemon's replies; copies_wait_s the wait for earlier copies to make room.
    """

    batches: int = 0
    ids_wait_s: float = 0.0
    store_wait_s: float = 0.0
    copies_wait_s: float = 0.0


class DeviceTicket:
    """A batch on its way into device memory: from DeviceTable.submit() on. wait() enqueues its copy."""

    __slots__ = ("_out", "_pieces", "_rows", "_stream", "_table", "_ticket")

    def __init__(
        self,
        table: DeviceTable,
        ticket: RingTicket | None,
        rows: int,
        pieces: list[tuple[int, int]],
        out: Any,
        stream: int,
    ) -> None:
        self._table = table
        self._ticket = ticket
        self._rows = rows
        self._pieces = pieces
        self._out = out
        self._stream = stream

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the reply, enqueues the copy, and returns the `out` given to submit().

        The rows are there in the order of the stream: for what is enqueued on it afterwards. Waiting again does
        nothing. timeout: of the daemon's reply, in seconds; after RequestTimeout it may be called again.
        Raises what Ticket.wait() raises (nothing is copied then), and GpuError.
        """
        ticket = self._ticket
        if ticket is not None:
            self._table._finish(ticket, self._pieces, self._stream, timeout)
            self._ticket = None
        return self._out

    def release(self) -> None:
        """Gives up a batch that was not waited for. What wait() has enqueued goes on."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class DeviceTable:
    """A table whose rows go to one GPU. One thread at a time; threads make one each, and share the registration.

    table: of a client over the ring. device: a number, "cuda:N", "hip:N" or a torch.device. max_rows: most rows of one
    batch, at most client.max_ticket_rows. layout: "packed" (rows as they are) or "split" (values, then scales).
    columns: of ids with two or more dimensions only these of the last are asked for (a rank's share: see
    rank_columns). depth: copies that may be under way before a call waits for the oldest.
    Raises GpuError (no driver, no device, memory that cannot be registered), ValueError.
    """

    def __init__(
        self,
        table: Table,
        device: object = 0,
        max_rows: int = 0,
        *,
        layout: Layout = "packed",
        columns: Columns | None = None,
        depth: int = 2,
    ) -> None:
        self._in_flight: deque[tuple[int, RingTicket]] = deque()
        self._spare_events: list[int] = []
        self._staging = 0
        self._is_open = False
        self._registration: Registration | None = None
        if not isinstance(table, RingTable):
            raise ValueError(
                "rows for a GPU travel through shared memory: connect to the daemon's socket path, not tcp"
            )
        limit = table._client.max_ticket_rows
        if not 0 <= max_rows <= limit:
            raise ValueError(
                f"max_rows is {max_rows}, but one reply holds {limit} rows (a quarter of the arena): ask for less at a "
                "time, or give the daemon a larger --arena"
            )
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.table = table
        self.max_rows = max_rows or limit
        self.layout = layout
        self.columns = columns
        self.timing = Timing()
        self._depth = depth
        self._row_bytes = table.row_bytes
        self._piece_bytes = [table.row_bytes]
        if layout != "packed":
            shapes = table._split_shapes((), layout)
            self._piece_bytes = [shape[-1] for shape in shapes]
        self.driver: Driver = open_driver(device)
        self._is_open = True
        entered = self.driver.enter()
        try:
            self._registration = registration_of(table._client.connected(), self.driver)
        finally:
            self.driver.leave(entered)

    # ---- requests

    def fetch(
        self,
        ids: Any,
        out: Any,
        stream: Any = None,
        *,
        ids_shape: tuple[int, ...] | None = None,
        ids_dtype: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """The rows of `ids` into `out`, in the order of `stream`; returns `out`. The same as submit(...).wait().

        Returns once the copy is enqueued. timeout: of the daemon's reply, in seconds.
        """
        return self.submit(ids, out, stream, ids_shape=ids_shape, ids_dtype=ids_dtype).wait(timeout)

    def submit(
        self,
        ids: Any,
        out: Any,
        stream: Any = None,
        *,
        ids_shape: tuple[int, ...] | None = None,
        ids_dtype: Any = None,
    ) -> DeviceTicket:
        """Asks for a batch and returns at once; DeviceTicket.wait() then enqueues the copy.

        ids: a host array (int32 or int64; may be changed afterwards), or device memory: a tensor, an object with
        __cuda_array_interface__, or an address together with ids_shape and ids_dtype. Ids in device memory are copied
        to the host first, which waits for all that `stream` was given before.
        out: device memory for rows x row_bytes bytes (a pair in split layout): a tensor, an object with
        __cuda_array_interface__, or an address, which is trusted. stream: a handle, or an object that has one.
        Raises RowIdError, ValueError, TypeError, Busy, DaemonLost, GpuError and what Table.submit() raises.
        """
        if not self._is_open:
            raise EngramError("the DeviceTable is closed")
        outputs = (out,) if self.layout == "packed" else tuple(out)
        if len(outputs) != len(self._piece_bytes):
            raise ValueError("out must be a pair (values, scales) in split layout")
        handle = stream_handle(stream, outputs[0])
        driver = self.driver
        entered = driver.enter()
        try:
            if driver.is_capturing(handle):
                raise GpuError(
                    "the stream is being captured into a graph, where the host cannot wait: use a StreamLane, or fetch "
                    "before the capture"
                )
            if ids_shape is not None or is_device_array(ids):
                ids = self._ids_from_device(ids, ids_shape, ids_dtype, handle)
            array = self._selected(ids)
            rows = array.size
            if rows > self.max_rows:
                raise ValueError(f"{rows} rows are more than this table's max_rows of {self.max_rows}")
            pieces = [
                (output_address(output, rows * size_bytes, "out"), rows * size_bytes)
                for output, size_bytes in zip(outputs, self._piece_bytes, strict=True)
                if rows
            ]
            self._reap()
            while len(self._in_flight) >= self._depth:
                self._wait_for_oldest()
            ticket = self._submit(array) if rows else None
        finally:
            driver.leave(entered)
        return DeviceTicket(self, ticket, rows, pieces, out, handle)

    def _selected(self, ids: Any) -> Ids:
        array = self.table._as_ids(ids)
        if self.columns is None:
            return array
        if array.ndim < 2:
            raise ValueError(f"columns select from ids of two or more dimensions, not from the shape {array.shape}")
        return self.table._as_ids(array[..., self.columns])

    def _submit(self, ids: Ids) -> RingTicket:
        while True:
            try:
                return self.table.submit(ids, layout=self.layout, on_full="busy" if self._in_flight else "wait")
            except Busy:
                # The room may be held by our own copies, which nobody else would wait for.
                if not self._in_flight:
                    raise
                self._wait_for_oldest()

    def _finish(self, ticket: RingTicket, pieces: list[tuple[int, int]], stream: int, timeout: float | None) -> None:
        """Waits for a reply and enqueues its copies."""
        started = time.perf_counter()
        source = ticket.wait_address(timeout)
        timing = self.timing
        timing.store_wait_s += time.perf_counter() - started
        timing.batches += 1
        driver = self.driver
        entered = driver.enter()
        try:
            session = ticket._binding.session
            if self._registration is None or self._registration.session is not session:
                self._registration = registration_of(session, driver)
            event = self._spare_events.pop() if self._spare_events else driver.create_event()
            try:
                for target, size_bytes in pieces:
                    driver.copy_to_device(target, source, size_bytes, stream)
                    source += size_bytes
                driver.record_event(event, stream)
            except GpuError:
                # A first copy may be under way although what came after it was refused.
                driver.destroy_event(event)
                with contextlib.suppress(GpuError):
                    driver.synchronize_stream(stream)
                raise
            self._in_flight.append((event, ticket))
        finally:
            driver.leave(entered)

    def _ids_from_device(self, ids: Any, shape: tuple[int, ...] | None, dtype: Any, stream: int) -> Ids:
        """A copy of ids that lie in device memory, in host memory of this table's own; waits for them."""
        array = device_array(ids, "ids")
        known_shape = shape if shape is not None else array.shape
        known_dtype = np.dtype(dtype) if dtype is not None else array.dtype
        if known_shape is None or known_dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise TypeError(
                "ids in device memory must be int32 or int64 and tell their shape; give ids_shape and ids_dtype with "
                "an address"
            )
        size_bytes = math.prod(known_shape) * known_dtype.itemsize
        if size_bytes == 0:
            return np.empty(known_shape, known_dtype)
        if size_bytes > 1 << 27:
            raise ValueError(f"{math.prod(known_shape)} ids are more than can be asked for at once")
        started = time.perf_counter()
        driver = self.driver
        staging = self._staging_memory(size_bytes)
        event = driver.create_event()
        try:
            driver.copy_to_host(staging, array.address, size_bytes, stream)
            driver.record_event(event, stream)
            driver.synchronize_event(event)
        finally:
            driver.destroy_event(event)
        self.timing.ids_wait_s += time.perf_counter() - started
        memory = ffi.buffer(ffi.cast("char *", staging), size_bytes)
        return np.frombuffer(memory, known_dtype).reshape(known_shape)

    def _staging_memory(self, size_bytes: int) -> int:
        if size_bytes > getattr(self, "_staging_bytes", 0):
            size_bytes = max(size_bytes, 1 << 16)
            if self._staging:
                self.driver.free_host(self._staging)
                self._staging = 0
            self._staging = self.driver.allocate_host(size_bytes)
            self._staging_bytes = size_bytes
        return self._staging

    # ---- streams that fetch by themselves

    def stream_lane(self, rows: int, out: Any, *, ids_dtype: Any = np.int32, deadline_s: float = 5.0) -> StreamLane:
        """A lane for batches of exactly `rows` ids, whose rows go to `out`: for graphs, and for decoding steps.

        out: as in submit(). deadline_s: the longest that a stream waits for the daemon in one use.
        Raises GpuError (ROCm has no such waits), Busy (no slot or room left), ValueError, DaemonLost.
        """
        if not self._is_open:
            raise EngramError("the DeviceTable is closed")
        if not self.driver.has_stream_waits:
            raise GpuError(f"{self.driver}: its streams cannot wait for shared memory; use fetch()")
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"rows must be 1 .. {self.max_rows}, not {rows}")
        entered = self.driver.enter()
        try:
            registration = registration_of(self.table._client.connected(), self.driver)
            return StreamLane(self, rows, out, ids_dtype, deadline_s, registration)
        finally:
            self.driver.leave(entered)

    # ---- copies under way

    def _reap(self) -> None:
        """Releases the tickets whose copies are done."""
        in_flight = self._in_flight
        while in_flight and self.driver.has_happened(in_flight[0][0]):
            self._release_oldest()

    def _wait_for_oldest(self) -> None:
        started = time.perf_counter()
        try:
            self.driver.synchronize_event(self._in_flight[0][0])
        finally:
            # After an error the device copies nothing any more.
            self._release_oldest()
            self.timing.copies_wait_s += time.perf_counter() - started

    def _release_oldest(self) -> None:
        event, ticket = self._in_flight.popleft()
        self._spare_events.append(event)
        ticket.release()

    def synchronize(self) -> None:
        """Waits until all copies that were enqueued are done. Raises GpuError."""
        entered = self.driver.enter()
        try:
            while self._in_flight:
                self._wait_for_oldest()
        finally:
            self.driver.leave(entered)

    def close(self) -> None:
        """Waits for copies under way and gives everything back. Closing twice is harmless."""
        if not self._is_open:
            return
        self._is_open = False
        driver = self.driver
        entered = driver.enter()
        try:
            while self._in_flight:
                try:
                    self._wait_for_oldest()
                except GpuError:
                    continue  # the caller's own calls on the stream report it
            for event in self._spare_events:
                driver.destroy_event(event)
            self._spare_events.clear()
            if self._staging:
                driver.free_host(self._staging)
                self._staging = 0
        finally:
            driver.leave(entered)
        self._registration = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except GpuError:
            return  # the context is gone, at the end of the process


def rank_columns(total: int, rank: int, world_size: int, *, strided: bool = False) -> slice:
    """The columns of one rank of `world_size`: a contiguous share, or every world_size-th from `rank` on.

    Raises ValueError where the columns do not divide evenly.
    """
    if world_size < 1 or not 0 <= rank < world_size or total % world_size:
        raise ValueError(f"{total} columns cannot be split evenly for rank {rank} of {world_size}")
    share = total // world_size
    return slice(rank, None, world_size) if strided else slice(rank * share, (rank + 1) * share)

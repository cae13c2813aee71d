"""DeviceTable: rows of a table into GPU memory, one copy per contiguous piece of a reply (host wait).

The host waits for the daemon's reply and then enqueues the copy; it never waits for the copy itself. A reply's ticket
is released once its copy is done, which the next calls notice, so one batch's copy overlaps the next batch's gather.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Ids, Layout
from ..errors import Busy, EngramError
from ..ring_table import RingTable, RingTicket
from ..table import Table
from .buffers import is_device_array, output_address, stream_handle
from .closing import Closing
from .device_ids import DeviceIds
from .device_ticket import DeviceTicket
from .driver import open_driver
from .driver_base import Driver, GpuError
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


class DeviceTable(Closing):
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
        self._device_ids = DeviceIds(self.driver)
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
        entered = self.driver.enter()
        try:
            ticket, pieces, handle = self._begin(ids, out, stream, ids_shape, ids_dtype)
            if ticket is not None:
                self._finish(ticket, pieces, handle, timeout)
        finally:
            self.driver.leave(entered)
        return out

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
        entered = self.driver.enter()
        try:
            ticket, pieces, handle = self._begin(ids, out, stream, ids_shape, ids_dtype)
        finally:
            self.driver.leave(entered)
        return DeviceTicket(self, ticket, pieces, out, handle)

    def _begin(
        self, ids: Any, out: Any, stream: Any, ids_shape: tuple[int, ...] | None, ids_dtype: Any
    ) -> tuple[RingTicket | None, list[tuple[int, int]], int]:
        """Checks and sends a batch: its ticket (None where it is empty), address and bytes of each piece, and the
        stream's handle. The device is current.
        """
        if not self._is_open:
            raise EngramError("the DeviceTable is closed")
        outputs = (out,) if self.layout == "packed" else tuple(out)
        if len(outputs) != len(self._piece_bytes):
            raise ValueError("out must be a pair (values, scales) in split layout")
        handle = stream_handle(stream, outputs[0])
        if self.driver.is_capturing(handle):
            raise GpuError(
                "the stream is being captured into a graph, where the host cannot wait: use a StreamLane, or fetch "
                "before the capture"
            )
        if ids_shape is not None or is_device_array(ids):
            started = time.perf_counter()
            ids = self._device_ids.copy(ids, ids_shape, ids_dtype, handle)
            self.timing.ids_wait_s += time.perf_counter() - started
        array = self._selected(ids)
        rows = array.size
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows are more than this table's max_rows of {self.max_rows}")
        if rows == 0:
            return None, [], handle
        pieces = [
            (output_address(output, rows * size_bytes, "out"), rows * size_bytes)
            for output, size_bytes in zip(outputs, self._piece_bytes, strict=True)
        ]
        self._reap()
        while len(self._in_flight) >= self._depth:
            self._wait_for_oldest()
        return self._submit(array), pieces, handle

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
        """Waits for a reply and enqueues its copies. The device is current."""
        started = time.perf_counter()
        source = ticket.wait_address(timeout)
        timing = self.timing
        timing.store_wait_s += time.perf_counter() - started
        timing.batches += 1
        driver = self.driver
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
            self._device_ids.free()
        finally:
            driver.leave(entered)
        self._registration = None


def rank_columns(total: int, rank: int, world_size: int, *, strided: bool = False) -> slice:
    """The columns of one rank of `world_size`: a contiguous share, or every world_size-th from `rank` on.

    Raises ValueError where the columns do not divide evenly.
    """
    if world_size < 1 or not 0 <= rank < world_size or total % world_size:
        raise ValueError(f"{total} columns cannot be split evenly for rank {rank} of {world_size}")
    share = total // world_size
    return slice(rank, None, world_size) if strided else slice(rank * share, (rank + 1) * share)

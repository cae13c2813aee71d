"""StreamLane: rows that a CUDA stream fetches by itself, also from within a captured graph (stream mode).

The stream copies the ids into shared memory, rings a doorbell word, waits for the daemon's completion word, and copies
the rows to the device; the host does nothing while that runs. A native watchdog releases the stream when the daemon is
gone or a deadline passes; the rows of that use are then worthless, which only result() tells. docs/gpu.md says more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .._native import ffi, lib
from ..errors import DaemonLost, EngramError, PageCorrupt, ReadFailed, RequestTimeout
from ..ring_session import raise_status, thread_error
from .buffers import device_array, output_address, stream_handle
from .closing import Closing
from .driver_base import WAIT_VALUE_32, WRITE_VALUE_32
from .registration import Registration

if TYPE_CHECKING:
    from .device_table import DeviceTable

#: What the stream copies out for the host: reply line, wait line, stream line of the slot.
_STATUS_BYTES = ffi.sizeof("engram_slot") - ffi.sizeof("engram_request")
_COMPLETION_EMPTY = 0
_COMPLETION_OK = 1


class StreamLane(Closing):
    """A fixed place for batches of `rows` rows whose rows go to `out`. Made by DeviceTable.stream_lane().

    enqueue() puts one use into a stream, or into the graph that the stream is being captured into; each replay of the
    graph is then one use, with whatever the ids are at that moment. Uses of one lane must follow one another in stream
    order. Shorter batches are filled up with -1.

    The rows in `out` count only after result() has said so, which reads what the daemon said about every use since its
    last call: nothing computed from them may leave the device before. A lane that was lost stays so, and lets streams
    pass that still use it: make a new one (and capture again) after DaemonLost or RequestTimeout.
    """

    def __init__(
        self, table: DeviceTable, rows: int, out: Any, ids_dtype: Any, deadline_s: float, registration: Registration
    ) -> None:
        self._lane: Any = None
        self._status = 0
        self._table = table
        self._registration = registration
        self._driver = driver = table.driver
        self._is_lost = False
        self._uses_seen = 0
        self._failures_seen = 0
        self.rows = rows
        self.out = out
        self._ids_dtype = np.dtype(ids_dtype)
        if self._ids_dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise TypeError(f"ids of a lane are int32 or int64, not {self._ids_dtype}")
        if not 0.001 <= deadline_s <= 3600:
            raise ValueError(f"deadline_s must be 0.001 .. 3600, not {deadline_s}")
        outputs = (out,) if table.layout == "packed" else tuple(out)
        self._pieces = [
            (output_address(output, rows * size_bytes, "out"), rows * size_bytes)
            for output, size_bytes in zip(outputs, table._piece_bytes, strict=True)
        ]
        binding = table.table._bind()
        lane = ffi.new("engram_lane *")
        error = thread_error.struct
        layout = lib.ENGRAM_LAYOUT_PACKED if table.layout == "packed" else lib.ENGRAM_LAYOUT_SPLIT
        status = lib.engram_lane_open(
            registration.session.handle,
            binding.layer,
            rows,
            self._ids_dtype.itemsize,
            layout,
            math.ceil(deadline_s * 1000),
            lane,
            error,
        )
        if status:
            table.table._fail(binding, status, error)
        self._lane = lane
        # The garbage collector ends the objects of a cycle in any order: the session waits for close().
        self._native = registration.session.handle
        lib.engram_session_retain(self._native)
        self._deadline_s = deadline_s
        ring = registration.ring_device_pointer()
        self._ids_target = ring + lane.ids_offset
        self._status_source = ring + lane.reply_line_offset
        self._rows_source = registration.memory.arena + lane.rows_offset
        self._status = driver.allocate_host(_STATUS_BYTES)
        self._status_target = driver.device_pointer(self._status)
        ffi.buffer(ffi.cast("char *", self._status), _STATUS_BYTES)[:] = bytes(_STATUS_BYTES)
        self._begin = driver.memory_operations(
            [
                (WRITE_VALUE_32, ring + lane.doorbell_offset, 1),
                (WAIT_VALUE_32, ring + lane.completion_offset, _COMPLETION_OK),
            ]
        )
        self._end = driver.memory_operations([(WRITE_VALUE_32, ring + lane.completion_offset, _COMPLETION_EMPTY)])

    def enqueue(self, ids: Any, stream: Any = None) -> None:
        """Puts one use into the stream, or into the graph it is being captured into.

        ids: device memory with `rows` ids of the lane's dtype: a tensor, an object with __cuda_array_interface__, or an
        address. It must stay where it is for as long as the graph is replayed; each replay reads its content anew.
        Raises ValueError, TypeError, GpuError.
        """
        lane = self._lane
        if lane is None:
            raise EngramError("the lane is closed")
        array = device_array(ids, "ids")
        size_bytes = self.rows * self._ids_dtype.itemsize
        if array.dtype is not None and array.dtype != self._ids_dtype:
            raise TypeError(f"the lane's ids are {self._ids_dtype}, not {array.dtype}")
        if array.nbytes is not None and array.nbytes != size_bytes:
            raise ValueError(f"ids have {array.nbytes} bytes, the lane's {self.rows} ids {size_bytes}")
        handle = stream_handle(stream, ids)
        driver = self._driver
        entered = driver.enter()
        try:
            driver.copy_any(self._ids_target, array.address, size_bytes, handle)
            driver.run_memory_operations(handle, self._begin)
            driver.copy_any(self._status_target, self._status_source, _STATUS_BYTES, handle)
            source = self._rows_source
            for target, piece_bytes in self._pieces:
                driver.copy_to_device(target, source, piece_bytes, handle)
                source += piece_bytes
            driver.run_memory_operations(handle, self._end)
        finally:
            driver.leave(entered)

    def result(self, after: Any) -> Any:
        """Waits for `after`, then returns `out` if every use since the last call was served; else raises.

        after: the stream that ran the uses (a handle or an object), or an event recorded behind them (anything with
        synchronize()). After an error the rows of these uses are worthless.
        Raises RowIdError, PageCorrupt, ReadFailed (this lane goes on), DaemonLost and RequestTimeout (it is lost),
        GpuError, and EngramError where no use has run since the last call.
        """
        if self.check(after) == 0:
            raise EngramError("no use of the lane has run since the last result(): wait for the stream that runs it")
        return self.out

    def check(self, after: Any) -> int:
        """Waits for `after`, then returns the number of uses since the last call, all of which were served; raises as
        result() does otherwise. None may have run: where steps overlap, an earlier call may have seen a later use."""
        if self._lane is None:
            raise EngramError("the lane is closed")
        self._synchronize(after)
        slot = ffi.new("engram_slot *")
        status = bytes(ffi.buffer(ffi.cast("char *", self._status), _STATUS_BYTES))
        ffi.buffer(slot)[ffi.sizeof("engram_request") :] = status
        reply = slot.reply
        if slot.stream_lost:
            self._raise_lost(slot.stream_lost)
        uses = int(reply.stream_completed) - self._uses_seen
        failures = reply.stream_failed - self._failures_seen
        self._uses_seen = int(reply.stream_completed)
        self._failures_seen = reply.stream_failed
        if uses and reply.completion != _COMPLETION_OK:
            self._raise_reply(reply)
        if failures:
            raise EngramError(f"{failures} of the lane's last {uses} uses failed; the last one did not")
        return uses

    def _synchronize(self, after: Any) -> None:
        synchronize = getattr(after, "synchronize", None)
        if synchronize is not None:
            synchronize()
            return
        entered = self._driver.enter()
        try:
            self._driver.synchronize_stream(stream_handle(after))
        finally:
            self._driver.leave(entered)

    def _raise_lost(self, why: int) -> NoReturn:
        table = self._table.table
        self._is_lost = True
        # The next lane needs a new session: this one's slots may still be written by a late daemon.
        table._client.forget(self._registration.session)
        if why == lib.ENGRAM_STREAM_DEADLINE:
            raise RequestTimeout(f"{table._info}: no reply to the stream within {self._deadline_s} s; make a new lane")
        raise DaemonLost(
            f"lost the daemon at {self._registration.session.path} while a stream used it; make a new lane"
        )

    def _raise_reply(self, reply: Any) -> NoReturn:
        table = self._table.table
        if reply.completion == lib.ENGRAM_STATUS_ROW_ID:
            raise table._row_id_error(reply.position, reply.row_id)
        if reply.completion == lib.ENGRAM_STATUS_PAGE_CORRUPT:
            raise PageCorrupt(
                f"{table._info}: page {reply.page} is corrupt: row {reply.row_id} does not match its checksum",
                reply.page,
                reply.row_id,
            )
        if reply.completion == lib.ENGRAM_STATUS_READ_FAILED:
            raise ReadFailed(
                f"{table._info}: page {reply.page} with row {reply.row_id} could not be read "
                f"(errno {reply.error_number})",
                reply.page,
                reply.row_id,
            )
        error = ffi.new(
            "engram_error *", {"status": reply.completion, "text": b"the daemon refused a stream's request"}
        )
        if reply.completion in (lib.ENGRAM_STATUS_STALE, lib.ENGRAM_STATUS_STOPPING):
            self._is_lost = True
            table._client.forget(self._registration.session)
        raise_status(self._registration.session, reply.completion, error, table._info)

    def close(self) -> None:
        """Gives the lane's place back. Its uses must be over, and graphs with it must not be replayed any more."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lib.engram_lane_close(self._native, lane)
            lib.engram_session_drop(self._native)
        status, self._status = self._status, 0
        if status:
            entered = self._driver.enter()
            try:
                self._driver.free_host(status)
            finally:
                self._driver.leave(entered)

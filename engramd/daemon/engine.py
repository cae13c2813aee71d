"""The native engine as Python objects: options in, counters and events out, status codes as error classes' names.

Nothing here keeps state of its own beyond the handles given out. The cffi calls release the GIL; calls that wait
(`warm`, `drain`) are not for the event loop's thread, except `drain` at the very end.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from engramd._engine import ffi, lib
from engramd.config import Settings
from engramd.daemon.native_values import fields_of, text_of
from engramd.daemon.process import reopen
from engramd.daemon.tables import ServedTable
from engramd.errors import EngramdError
from engramd.tier_policy import LayerPolicy

_ERROR_BYTES = 512
_LOG = logging.getLogger("engramd")
_READERS = {"auto": lib.ENGRAM_READER_AUTO, "io_uring": lib.ENGRAM_READER_IO_URING, "pread": lib.ENGRAM_READER_PREAD}
READER_NAMES = {lib.ENGRAM_READER_IO_URING: "io_uring", lib.ENGRAM_READER_PREAD: "pread"}
TIER_NAMES = {
    lib.ENGRAM_TIER_CACHED: "cached",
    lib.ENGRAM_TIER_LOADING: "loading",
    lib.ENGRAM_TIER_RESIDENT: "resident",
}
_POLICY_TIERS = {
    "auto": lib.ENGRAM_POLICY_AUTO,
    "resident": lib.ENGRAM_POLICY_RESIDENT,
    "cached": lib.ENGRAM_POLICY_CACHED,
}
_LAYOUTS = {"packed": lib.ENGRAM_LAYOUT_PACKED, "split": lib.ENGRAM_LAYOUT_SPLIT}
# The client raises these classes; statistics and control replies name errors by them.
ERROR_CLASSES = {
    lib.ENGRAM_STATUS_ROW_ID: "RowIdError",
    lib.ENGRAM_STATUS_UNKNOWN_TABLE: "UnknownTable",
    lib.ENGRAM_STATUS_STALE: "TableMismatch",
    lib.ENGRAM_STATUS_BUSY: "Busy",
    lib.ENGRAM_STATUS_TIMEOUT: "RequestTimeout",
    lib.ENGRAM_STATUS_PAGE_CORRUPT: "PageCorrupt",
    lib.ENGRAM_STATUS_READ_FAILED: "ReadFailed",
    lib.ENGRAM_STATUS_BAD_REQUEST: "EngramError",
    lib.ENGRAM_STATUS_STOPPING: "DaemonLost",
    lib.ENGRAM_STATUS_LOST: "DaemonLost",
}
SLOT_COUNT = 64  # of a session's ring
LATENCY_BUCKETS = 1024  # the most a latency class can have


@dataclass(frozen=True)
class ServedLayer:
    """A layer under the handle that the engine gave it."""

    handle: int
    table: ServedTable
    layer: int
    rows: int
    head_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Event:
    """One event of the engine; fields as in engram_event."""

    kind: int
    status: int
    session: int
    handle: int
    error_number: int
    page: int
    row_id: int
    request_id: int
    text: str


class Completion(NamedTuple):
    """The end of a request. failure: engram_failure, valid until the next call of submit or next_completion. rows: of a
    fetch that succeeded, a buffer that frees them with its last reference and does not need the engine; else None."""

    tag: int
    failure: Any
    rows: Any


class KeptRows(Protocol):
    """See engramd.daemon.kept_memory."""

    def of(self, table_id: bytes, generation: int, layer: int) -> int | None: ...

    def close(self) -> None: ...


class SessionRefused(Exception):
    """The engine opens no session; `status` is an ENGRAM_STATUS_* for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Engine:
    """A running engine with the layers of some tables. Raises EngramdError where it cannot be made."""

    def __init__(
        self, settings: Settings, tables: list[ServedTable], *, kept: KeptRows | None = None, start: bool = True
    ) -> None:
        """kept: gives what an earlier daemon may have left of a layer's rows; a descriptor that this does not close.
        start=False: for checks alone, it never serves."""
        error = ffi.new("char[]", _ERROR_BYTES)
        options = ffi.new("engram_engine_options *")
        options.dram_bytes = settings.dram_bytes
        options.arena_bytes = settings.arena_bytes
        options.arena_limit_bytes = settings.arena_limit_bytes
        options.session_limit = settings.sessions
        options.slot_count = SLOT_COUNT
        options.workers = settings.workers
        options.reader = _READERS[settings.reader]
        options.poll_permille = max(1, round(settings.poll_budget * 1000))
        options.prefetch_rows = settings.prefetch_rows
        self._engine = lib.engram_engine_create(options, error, _ERROR_BYTES)
        if self._engine == ffi.NULL:
            raise EngramdError(f"the engine does not start: {text_of(error)}")
        self.layers: list[ServedLayer] = []  # served now; replaced as a whole, by the loop's thread
        self.by_handle: dict[int, ServedLayer] = {}  # all that were ever opened
        self._cache_groups: dict[str, int] = {"": 0}  # by the name of the cache in a policy
        try:
            for table in tables:
                try:
                    self.layers += self.add_table(table, kept)
                except EngramdError as refusal:
                    raise EngramdError(f"table {table.name}: {refusal}") from None
            if kept is not None:
                kept.close()
            if start and lib.engram_engine_start(self._engine, error, _ERROR_BYTES) != 0:
                raise EngramdError(f"the engine does not start: {text_of(error)}")
        except BaseException:
            self.destroy()
            raise
        self.state_descriptor = int(lib.engram_engine_state_descriptor(self._engine))
        self.event_descriptor = int(lib.engram_engine_event_descriptor(self._engine))
        self.completion_descriptor = int(lib.engram_engine_completion_descriptor(self._engine))
        self._completion = ffi.new("engram_completion *")

    @property
    def pointer(self) -> Any:
        """The native engine, for modules that call functions of their own; NULL after destroy."""
        return self._engine

    def add_table(
        self, table: ServedTable, kept: KeptRows | None = None, replaced: Sequence[ServedLayer] = ()
    ) -> list[ServedLayer]:
        """Opens a table's layers in the engine, under new handles. Raises EngramdError with none of them added, also
        where the engine serves and they could not be placed in DRAM once the replaced ones are gone."""
        error = ffi.new("char[]", _ERROR_BYTES)
        manifest = table.manifest
        count = len(manifest.layers)
        options = ffi.new("engram_layer_options[]", count)
        in_use = []  # by `options`: cffi frees what nobody refers to
        for one, layer, descriptors in zip(options, manifest.layers, table.descriptors, strict=True):
            files = ffi.new("int[]", list(descriptors))
            memory = kept.of(manifest.table_id, manifest.generation, layer.layer) if kept is not None else None
            kept_memory = ffi.NULL if memory is None else ffi.new("int *", memory)
            in_use += [files, kept_memory]
            one.table_id = manifest.table_id
            one.generation = manifest.generation
            one.rows = layer.rows
            one.layer = layer.layer
            one.row_bytes = manifest.row_bytes
            one.value_bytes = manifest.value_bytes
            one.stripe_pages = manifest.stripe_pages
            one.files = files
            one.file_count = len(descriptors)
            one.policy = self._policy(table.policy.of(layer.layer))[0]
            one.kept_memory = kept_memory
        handles = ffi.new("uint32_t[]", count)
        old = [layer.handle for layer in replaced]
        if lib.engram_engine_add_layers(self._engine, options, count, old, len(old), handles, error, _ERROR_BYTES) != 0:
            raise EngramdError(text_of(error))
        added = [
            ServedLayer(int(handle), table, layer.layer, layer.rows, layer.head_sizes)
            for handle, layer in zip(handles, manifest.layers, strict=True)
        ]
        self.by_handle |= {layer.handle: layer for layer in added}
        return added

    def retire_layer(self, handle: int, timeout_ms: int) -> bool:
        """Serves a layer no more; waits for its running batches. False where they run longer than the timeout."""
        return int(lib.engram_engine_retire_layer(self._engine, handle, timeout_ms)) == 0

    def place(self, dram_bytes: int) -> None:
        """Places the served layers in DRAM anew, under this budget. Waits for running batches. Raises EngramdError."""
        error = ffi.new("char[]", _ERROR_BYTES)
        if lib.engram_engine_place(self._engine, dram_bytes, error, _ERROR_BYTES) != 0:
            raise EngramdError(text_of(error))

    def check_place(self, dram_bytes: int) -> None:
        """Raises EngramdError where the layers in the engine could not be placed under this budget."""
        error = ffi.new("char[]", _ERROR_BYTES)
        if lib.engram_engine_check_place(self._engine, dram_bytes, error, _ERROR_BYTES) != 0:
            raise EngramdError(text_of(error))

    def map_layer(self, handle: int) -> tuple[Any, int]:
        """(engram_resident_memory *, a read-only descriptor for the caller to close) of a resident layer, once all of
        it has been checked; counts as a map until unmap_layer. Raises EngramdError with the reason where there is
        none."""
        error = ffi.new("char[]", _ERROR_BYTES)
        memory = ffi.new("engram_resident_memory *")
        if lib.engram_engine_map_layer(self._engine, handle, memory, error, _ERROR_BYTES) != 0:
            raise EngramdError(text_of(error))
        try:
            return memory, reopen(memory.descriptor)
        except OSError as failure:
            self.unmap_layer(handle)
            raise EngramdError(f"no descriptor for it: {failure.strerror}") from None
        finally:
            os.close(memory.descriptor)

    def unmap_layer(self, handle: int) -> None:
        """One client fewer has the layer mapped."""
        lib.engram_engine_unmap_layer(self._engine, handle)

    def set_policy(self, layer: ServedLayer, policy: LayerPolicy) -> None:
        """Changes what `place` is to do with a layer from its next call on."""
        lib.engram_engine_set_policy(self._engine, layer.handle, self._policy(policy))

    def _policy(self, policy: LayerPolicy) -> Any:
        """An engram_layer_policy *."""
        converted = ffi.new("engram_layer_policy *")
        converted.tier = _POLICY_TIERS[policy.tier]
        converted.cache_group = self._cache_groups.setdefault(policy.cache, len(self._cache_groups))
        converted.cache_share = policy.dram_share or 0.0
        converted.row_layout = _LAYOUTS[policy.resident_layout]
        return converted

    def hot_rows(self, handle: int, piece_rows: int) -> Iterator[array[int]]:
        """The layer's cached rows, hottest first, in arrays of at most piece_rows unsigned 64-bit row ids."""
        cursor = ffi.new("uint64_t *", 0)
        while True:
            rows = array("Q", bytes(8 * piece_rows))
            count = lib.engram_engine_hot_rows(
                self._engine, handle, cursor, ffi.from_buffer("uint64_t[]", rows, require_writable=True), piece_rows
            )
            if count == 0:
                return
            yield rows[:count]

    def warm(self, handle: int, rows: array[int], timeout_ms: int) -> bool:
        """Reads rows (at most 65,536) into the row cache behind all demand; waits. False where it was refused."""
        status = lib.engram_engine_warm(
            self._engine, handle, ffi.from_buffer("uint64_t[]", rows), len(rows), timeout_ms
        )
        return bool(status == lib.ENGRAM_STATUS_OK)

    def next_event(self) -> Event | None:
        """Takes one event, or None."""
        event = ffi.new("engram_event *")
        if lib.engram_engine_next_event(self._engine, event) != 1:
            return None
        return Event(
            kind=event.kind,
            status=event.status,
            session=event.session,
            handle=event.handle,
            error_number=event.error_number,
            page=event.page,
            row_id=event.row_id,
            request_id=event.request_id,
            text=text_of(event.text),
        )

    def open_session(self, pid: int, uid: int, arena_bytes: int, flags: int) -> tuple[Any, tuple[int, int, int]]:
        """(engram_welcome *, (ring, arena, doorbell)); the caller closes the three. Raises SessionRefused."""
        error = ffi.new("char[]", _ERROR_BYTES)
        welcome = ffi.new("engram_welcome *")
        descriptors = ffi.new("engram_session_descriptors *")
        status = lib.engram_engine_open_session(
            self._engine, pid, uid, arena_bytes, flags, welcome, descriptors, error, _ERROR_BYTES
        )
        if status != 0:
            raise SessionRefused(status if status > 0 else lib.ENGRAM_STATUS_BUSY, text_of(error))
        return welcome, (descriptors.ring, descriptors.arena, descriptors.doorbell)

    def start_session(self, session: int) -> None:
        """Hands a session whose client has mapped the ring to its worker. Raises SessionRefused."""
        error = ffi.new("char[]", _ERROR_BYTES)
        status = lib.engram_engine_start_session(self._engine, session, error, _ERROR_BYTES)
        if status != 0:
            raise SessionRefused(status if status > 0 else lib.ENGRAM_STATUS_BUSY, text_of(error))

    def close_session(self, session: int) -> None:
        """Ends a session; returns at once. Unknown ones are ignored."""
        lib.engram_engine_close_session(self._engine, session)

    def submit(self, request: Any, ids: bytes, tag: int) -> tuple[int, Completion | None]:
        """Begins an engram_request from private memory, of which nothing is needed afterwards. (0, its end where it was
        served at once, or None where next_completion will give it), or (ENGRAM_STATUS_* of a refusal or -1 for want of
        memory, None). One thread at a time, as next_completion."""
        completion = self._completion
        status = lib.engram_engine_submit(self._engine, request, ffi.from_buffer(ids), tag, completion)
        if status != 0 or completion.failure.status == lib.ENGRAM_STATUS_EMPTY:
            return status, None
        return 0, _completion_of(completion)

    def next_completion(self) -> Completion | None:
        """Takes one completion, or None."""
        completion = self._completion
        if lib.engram_engine_next_completion(self._engine, completion) != 1:
            return None
        return _completion_of(completion)

    def layer_counters(self) -> dict[int, dict[str, Any]]:
        """The fields of engram_layer_counters, by handle."""
        capacity = len(self.by_handle)  # served and retired: never too few
        counters = ffi.new("engram_layer_counters[]", capacity)
        count = min(lib.engram_engine_layer_counters(self._engine, counters, capacity), capacity)
        return {counters[index].handle: fields_of(counters[index]) for index in range(count)}

    def session_counters(self) -> list[dict[str, Any]]:
        """The fields of engram_session_counters of each open session."""
        capacity = 64
        while True:
            counters = ffi.new("engram_session_counters[]", capacity)
            count = lib.engram_engine_session_counters(self._engine, counters, capacity)
            if count <= capacity:
                return [fields_of(counters[index]) for index in range(count)]
            capacity = count + 64

    def counters(self) -> dict[str, Any]:
        """The fields of engram_engine_counters. Waits for a placement that is under way: not for the event loop."""
        counters = ffi.new("engram_engine_counters *")
        lib.engram_engine_read_counters(self._engine, counters)
        return fields_of(counters[0])

    def latency_histogram(self, latency_class: int) -> tuple[int, list[tuple[int, int]]]:
        """(sum of latencies in ns, [(end in ns, requests), ...] shortest first, without empty buckets) of a class."""
        buckets = ffi.new("engram_latency_bucket[]", LATENCY_BUCKETS)
        sum_ns = ffi.new("uint64_t *")
        count = lib.engram_engine_latency_histogram(self._engine, latency_class, buckets, LATENCY_BUCKETS, sum_ns)
        return int(sum_ns[0]), [(buckets[index].end_ns, buckets[index].count) for index in range(count)]

    def budget_bytes(self) -> int:
        """The DRAM budget in force. Waits for nothing, unlike counters(), which waits for a running placement."""
        return int(lib.engram_engine_budget_bytes(self._engine))

    def drain(self, timeout_ms: int) -> bool:
        """Refuses new requests and waits for running ones; whether all are done."""
        return bool(lib.engram_engine_drain(self._engine, timeout_ms) == 0)

    def destroy(self) -> None:
        """Stops the threads and frees everything. Nothing may be called afterwards; a second call does nothing."""
        if self._engine != ffi.NULL:
            lib.engram_engine_destroy(self._engine)
            self._engine = ffi.NULL


def _completion_of(completion: Any) -> Completion:
    """An engram_completion's, with the rows in the keeping of a buffer."""
    rows = None
    if completion.rows != ffi.NULL:
        size = completion.bytes
        rows = ffi.buffer(ffi.gc(completion.rows, lib.engram_rows_free, size), size)
    return Completion(completion.tag, completion.failure, rows)


def injected_faults() -> dict[str, int] | None:
    """How many disk faults of each kind have been injected; None in an ordinary build, which cannot inject any."""
    text = ffi.new("char[]", _ERROR_BYTES)
    if lib.engram_fault_report(text, _ERROR_BYTES) == 0:
        return None
    return {kind: int(count) for kind, count in (entry.split("=") for entry in text_of(text).split())}

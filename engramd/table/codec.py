"""Python's door to the native page codec: encode, verify and compare whole pages, and the rows of synthetic tables.

Every call releases the interpreter lock and works on buffers of the caller; nothing here keeps a reference to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engramd._engine import ffi, lib
from engramd.errors import EngramdError
from engramd.table.manifest import Layer, Manifest

Buffer = bytes | bytearray | memoryview
MAX_FAULTS = 4096  # of one call, kept for reports; the count is exact whatever the number
_NO_ROW = (1 << 64) - 1


class Reason(IntEnum):
    """Why a page was refused (ENGRAM_FAULT_* of pages.h)."""

    ROW = 1
    TRAILER = 2
    PADDING = 3
    SOURCE = 4


@dataclass(frozen=True)
class Fault:
    """A bad page. `row` is the row id of its first bad row, None where the trailer or the padding is bad."""

    page: int
    row: int | None
    reason: Reason


class PageFormat:
    """What the pages of one layer depend on; see engram_page_format. Immutable, may be shared by threads."""

    def __init__(
        self, table_id: bytes, generation: int, layer: int, rows: int, row_bytes: int, value_bytes: int
    ) -> None:
        if len(table_id) != 16:
            raise ValueError(f"table id of {len(table_id)} bytes, not 16")
        self._format: Any = ffi.new("engram_page_format *")
        ffi.memmove(self._format.table_id, table_id, 16)
        self._format.generation = generation
        self._format.rows = rows
        self._format.layer = layer
        self._format.row_bytes = row_bytes
        self._format.value_bytes = value_bytes
        self.layer = layer
        self.value_bytes = value_bytes
        self.scale_bytes = row_bytes - value_bytes
        self.page_bytes: int = lib.engram_page_bytes(row_bytes)
        self.rows_per_page: int = lib.engram_rows_per_page(row_bytes)
        self._rows = rows

    def _pages_of(self, first_page: int, pages: int) -> int:
        """Rows of the pages; the buffers are checked against it, since native code trusts their sizes."""
        first_row = first_page * self.rows_per_page
        return min(pages * self.rows_per_page, self._rows - first_row)

    def _source(self, first_page: int, pages: int, values: Buffer, scales: Buffer | None) -> tuple[Any, Any]:
        rows = self._pages_of(first_page, pages)
        _check_size("values", values, rows * self.value_bytes)
        if not self.scale_bytes:
            return ffi.from_buffer(values), ffi.NULL
        if scales is None:
            raise ValueError("the format has a scale part, but there are no scales")
        _check_size("scales", scales, rows * self.scale_bytes)
        return ffi.from_buffer(values), ffi.from_buffer(scales)

    def encode(
        self, first_page: int, pages: int, values: Buffer, scales: Buffer | None, out: bytearray | memoryview
    ) -> None:
        """Interleaves rows into `pages` pages. values and scales begin with the first row of `first_page`."""
        source = self._source(first_page, pages, values, scales)
        _check_size("out", out, pages * self.page_bytes)
        target = ffi.from_buffer(out, require_writable=True)
        if lib.engram_pages_encode(self._format, first_page, pages, *source, target) != 0:
            raise ValueError(f"pages {first_page} .. {first_page + pages} are not pages of this layer")

    def verify(self, first_page: int, pages: int, data: Buffer) -> tuple[int, list[Fault]]:
        """Checks pages in full: (number of bad ones, the first MAX_FAULTS of them)."""
        _check_size("data", data, pages * self.page_bytes)
        faults = ffi.new("engram_page_fault[]", min(pages, MAX_FAULTS))
        bad = lib.engram_pages_verify(self._format, first_page, pages, ffi.from_buffer(data), faults, len(faults))
        return self._faults(bad, faults, first_page, pages)

    def compare(
        self, first_page: int, pages: int, data: Buffer, values: Buffer, scales: Buffer | None
    ) -> tuple[int, list[Fault]]:
        """Compares the rows of pages with their source; the result is as of `verify`."""
        _check_size("data", data, pages * self.page_bytes)
        source = self._source(first_page, pages, values, scales)
        faults = ffi.new("engram_page_fault[]", min(pages, MAX_FAULTS))
        bad = lib.engram_pages_compare(
            self._format, first_page, pages, ffi.from_buffer(data), *source, faults, len(faults)
        )
        return self._faults(bad, faults, first_page, pages)

    def _faults(self, bad: int, faults: Any, first_page: int, pages: int) -> tuple[int, list[Fault]]:
        if bad < 0:
            raise ValueError(f"pages {first_page} .. {first_page + pages} are not pages of this layer")
        return bad, [
            Fault(fault.page, None if fault.row == _NO_ROW else fault.row, Reason(fault.reason))
            for fault in faults[0 : min(bad, len(faults))]
        ]


def format_of(manifest: Manifest, layer: Layer) -> PageFormat:
    """The format of a packed layer's pages."""
    return PageFormat(
        manifest.table_id, manifest.generation, layer.layer, layer.rows, manifest.row_bytes, manifest.value_bytes
    )


def _check_size(name: str, buffer: Buffer, needed: int) -> None:
    size = memoryview(buffer).nbytes
    if size < needed:
        raise ValueError(f"{name}: {size} bytes, but {needed} are needed")


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, continuing from `crc`."""
    return int(lib.engram_crc32c(crc, ffi.from_buffer(data), memoryview(data).nbytes))


def synth_rows(
    seed: int,
    layer: int,
    first_row: int,
    rows: int,
    value_bytes: int,
    begin: int,
    end: int,
    out: bytearray | memoryview,
) -> None:
    """Writes bytes [begin, end) of `rows` synthetic rows, tightly packed, to the front of `out`."""
    _check_size("out", out, rows * (end - begin))
    target = ffi.from_buffer(out, require_writable=True)
    if lib.engram_synth_rows(seed, layer, first_row, rows, value_bytes, begin, end, target) != 0:
        raise ValueError(f"no such part of a row: [{begin}, {end})")


def head_sizes(vocab_size: int, layers: int, max_ngram: int, heads: int) -> Sequence[tuple[int, ...]]:
    """The head sizes (primes) of each layer, in hash column order; raises EngramdError where they are out of range."""
    columns = (max_ngram - 1) * heads
    if not (1 <= layers <= 256 and 2 <= max_ngram <= 8 and heads >= 1 and layers * columns <= 1 << 16):
        raise EngramdError(f"no head sizes for {layers} layers, n-grams up to {max_ngram} and {heads} heads")
    out = ffi.new("int64_t[]", layers * columns)
    if not 1 <= vocab_size < 1 << 62 or lib.engram_head_sizes(vocab_size, layers, max_ngram, heads, out) != 0:
        raise EngramdError(f"no head sizes for a vocabulary of {vocab_size}")
    return [tuple(out[i * columns : (i + 1) * columns]) for i in range(layers)]

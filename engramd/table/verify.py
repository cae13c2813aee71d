"""Verifying a packed table: every checksum, trailer and padding byte, and on request every row against its source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

from engramd.checkpoint.mapping import SourceLayer, TableSource
from engramd.errors import EngramdError
from engramd.progress import Progress
from engramd.table.codec import Fault, Reason, format_of
from engramd.table.files import Files, aligned_buffer
from engramd.table.geometry import Chunk
from engramd.table.manifest import Layer, Manifest
from engramd.table.pipeline import read_ahead
from engramd.table.source_reader import SourceReader, SourceSlot

READ_SLOTS = 3
MAX_REPORTED = 20
_TEXTS = {
    Reason.ROW: "the checksum does not match: a damaged, misplaced or stale row",
    Reason.TRAILER: "the trailer is damaged, or of another page, generation or table",
    Reason.PADDING: "bytes that must be zero are not",
    Reason.SOURCE: "differs from the checkpoint",
}


@dataclass
class Report:
    """What a verification found. `faults` are the first MAX_REPORTED bad pages as (layer, fault)."""

    pages: int = 0
    rows: int = 0
    bytes: int = 0
    bad_pages: int = 0
    faults: list[tuple[int, Fault]] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [
            f"layer {layer} page {fault.page}{'' if fault.row is None else f' row {fault.row}'}: {_TEXTS[fault.reason]}"
            for layer, fault in self.faults
        ]


@dataclass
class _Slot:
    pages: memoryview
    source: SourceSlot | None


def verify(manifest: Manifest, against: TableSource | None = None, files: Files | None = None) -> Report:
    """Reads the table through (of a sparse table: the pages that exist) and checks it. Raises EngramdError where it
    cannot be read, or where `against` has another geometry; bad pages are in the report."""
    files = files or Files()
    sources = matching_layers(manifest, against) if against else {}
    report = Report()
    work = _work(manifest)
    formats = {layer.layer: format_of(manifest, layer) for layer in manifest.layers}
    chunk_bytes = manifest.geometry.chunk_pages * manifest.page_bytes
    slots = [_Slot(aligned_buffer(chunk_bytes), SourceSlot(against) if against else None) for _ in range(READ_SLOTS)]
    reader = _TableReader(manifest, files)
    source_reader = SourceReader(against, files) if against else None

    def fill(slot: _Slot, item: tuple[Layer, Chunk]) -> None:
        layer, chunk = item
        reader.read(layer, chunk, slot.pages)
        if source_reader is not None and slot.source is not None:
            source_reader.read_chunk(slot.source, sources[layer.layer], chunk)

    total = _page_count(manifest) * manifest.page_bytes
    try:
        with (
            closing(read_ahead(work, slots, fill)) as filled,
            Progress("verifying", total) as progress,
        ):
            for (layer, chunk), slot in filled:
                page_format = formats[layer.layer]
                bad, faults = page_format.verify(chunk.first_page, chunk.pages, slot.pages)
                if slot.source is not None:
                    _, differing = page_format.compare(
                        chunk.first_page, chunk.pages, slot.pages, slot.source.values, slot.source.scales
                    )
                    faulty = {fault.page for fault in faults}
                    extra = [fault for fault in differing if fault.page not in faulty]
                    faults = sorted(faults + extra, key=lambda fault: fault.page)
                    bad += len(extra)
                report.bad_pages += bad
                report.faults += [(layer.layer, fault) for fault in faults[: MAX_REPORTED - len(report.faults)]]
                report.pages += chunk.pages
                report.rows += chunk.rows
                report.bytes += chunk.pages * manifest.page_bytes
                progress.advance(chunk.pages * manifest.page_bytes)
    except OSError as error:
        raise EngramdError(f"{manifest.directory}: cannot be read: {error.strerror}") from None
    finally:
        reader.close()
        if source_reader is not None:
            source_reader.close()
    if against is not None:
        against.check_unchanged()
    return report


class _TableReader:
    """Reads pages of the table's data files, all of which are opened at once: a pack that publishes meanwhile removes
    their names, not their content."""

    def __init__(self, manifest: Manifest, files: Files) -> None:
        self._manifest = manifest
        self._files = files
        self._fds: dict[str, int] = {}
        try:
            for layer in manifest.layers:
                for file in layer.files:
                    self._fds[file.path] = files.open_direct(file.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self.close()
            raise EngramdError(f"{error.filename}: cannot be opened: {error.strerror}") from None

    def close(self) -> None:
        for fd in self._fds.values():
            self._files.close(fd)
        self._fds.clear()

    def read(self, layer: Layer, chunk: Chunk, buffer: memoryview) -> None:
        for extent, target in self._manifest.striping(layer).pieces(chunk.first_page, chunk.pages, buffer):
            path = layer.files[extent.file_index].path
            got = self._files.read_at(self._fds[path], target, extent.offset, path)
            if got != len(target):
                raise EngramdError(f"{path}: ends at byte {extent.offset + got}: it was cut while it was being read")


def _work(manifest: Manifest) -> Iterator[tuple[Layer, Chunk]]:
    """The chunks to check; of a sparse table, the pages that hold the first or last row of a head."""
    shape = manifest.geometry
    for layer in manifest.layers:
        if manifest.sparse is None:
            for chunk in shape.chunks(layer.rows):
                yield layer, chunk
            continue
        for page in sparse_pages(layer, shape.rows_per_page):
            first_row = page * shape.rows_per_page
            yield layer, Chunk(page, 1, first_row, min(shape.rows_per_page, layer.rows - first_row))


def _page_count(manifest: Manifest) -> int:
    if manifest.sparse is None:
        return sum(layer.pages for layer in manifest.layers)
    return sum(len(sparse_pages(layer, manifest.rows_per_page)) for layer in manifest.layers)


def sparse_pages(layer: Layer, rows_per_page: int) -> list[int]:
    """The pages that a sparse table has: those with the first or the last row of each head."""
    pages = set()
    start = 0
    for size in layer.head_sizes:
        pages |= {start // rows_per_page, (start + size - 1) // rows_per_page}
        start += size
    return sorted(pages)


def matching_layers(manifest: Manifest, source: TableSource) -> dict[int, SourceLayer]:
    """The source's layers by number; raises EngramdError unless they are exactly the table's."""
    theirs = {layer.layer: layer for layer in source.layers}
    found = [(part.bytes, part.dtype) for part in manifest.parts]
    expected = [(part.row_bytes, part.dtype) for part in source.parts]
    if found != expected:
        raise EngramdError(f"{manifest.directory}: rows of {found}, but the checkpoint has rows of {expected}")
    table = {layer.layer: layer.rows for layer in manifest.layers}
    if table != {number: layer.rows for number, layer in theirs.items()}:
        raise EngramdError(
            f"{manifest.directory}: layers and rows {table}, but the checkpoint has "
            f"{ {number: layer.rows for number, layer in theirs.items()} }"
        )
    return theirs

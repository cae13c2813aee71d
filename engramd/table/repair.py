"""Repairing a packed table: its bad pages are made again from the checkpoint and written in place.

The checkpoint is read through and its identity compared with the table's before anything is written, so that a page is
only ever replaced by what was packed. Table id and generation stay, so a daemon that serves the table meets good pages
at its next reads. A repair that is cut short leaves some pages as bad as they were; the next one goes on.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from engramd.checkpoint.mapping import SourceLayer, TableSource
from engramd.errors import EngramdError
from engramd.progress import Progress
from engramd.table.codec import format_of
from engramd.table.files import Files, aligned_buffer, explain
from engramd.table.geometry import Chunk
from engramd.table.identity import identity_of, parts_of
from engramd.table.manifest import DataFile, Layer, Manifest
from engramd.table.pipeline import read_ahead
from engramd.table.source_reader import SourceReader, SourceSlot
from engramd.table.verify import matching_layers


@dataclass
class Repair:
    """What a repair found. `bad` are all bad pages as (layer, page)."""

    pages: int = 0
    bytes: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Slot:
    """A chunk of the table beside its source. `missing`: pages that could not be read."""

    pages: memoryview
    source: SourceSlot
    missing: set[int] = field(default_factory=set)


def repair(manifest: Manifest, source: TableSource, files: Files | None = None) -> Repair:
    """Rewrites the bad pages of the table. Raises EngramdError, with nothing written where the checkpoint is not what
    was packed."""
    return _Repairer(manifest, source, files or Files()).run()


class _Repairer:
    def __init__(self, manifest: Manifest, source: TableSource, files: Files) -> None:
        self.manifest = manifest
        self.source = source
        self.files = files
        self.shape = manifest.geometry
        if manifest.sparse is not None:
            raise EngramdError(f"{manifest.directory}: a sparse table is of no checkpoint: make it again")
        self.layers = matching_layers(manifest, source)
        self.formats = {layer.layer: format_of(manifest, layer) for layer in manifest.layers}
        self.fds: dict[str, int] = {}

    def run(self) -> Repair:
        with self._locked(), self._opened():
            report, digests = self._examine()
            identity = identity_of(
                self.manifest.row_bytes,
                parts_of(self.source),
                [(layer.layer, layer.rows) for layer in self.manifest.layers],
                digests,
            )
            if identity != self.manifest.identity:
                raise EngramdError(
                    f"{self.source.directory}: its content has identity {identity}, but {self.manifest.directory} was "
                    f"packed from {self.manifest.identity}: nothing was written; name the checkpoint that was packed, "
                    "or pack this one as a new generation"
                )
            self.source.check_unchanged()
            if report.bad:
                self._rewrite(report.bad)
            return report

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps packs of the same table out."""
        directory = os.open(self.manifest.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise EngramdError(f"{self.manifest.directory}: a pack is at work on this table; wait for it") from None
        finally:
            os.close(directory)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        try:
            for layer in self.manifest.layers:
                for file in layer.files:
                    self.fds[file.path] = self._open(file)
            yield
        finally:
            for fd in self.fds.values():
                self.files.close(fd)
            self.fds.clear()

    def _open(self, file: DataFile) -> int:
        try:
            fd = self.files.open_direct(file.path, os.O_RDWR)
        except OSError as error:
            raise EngramdError(
                f"{file.path}: cannot be opened: {error.strerror}; a file that is missing is not repaired: pack again"
            ) from None
        size = os.fstat(fd).st_size
        if size > file.bytes:
            self.files.close(fd)
            raise EngramdError(f"{file.path}: {size} bytes, more than its {file.bytes}: not a file of this table")
        return fd

    def _examine(self) -> tuple[Repair, list[bytes]]:
        """Compares every page with the source; returns what is bad and the digests of the source's chunks."""
        work = [(layer, chunk) for layer in self.manifest.layers for chunk in self.shape.chunks(layer.rows)]
        page_bytes = self.manifest.page_bytes
        slots = [_Slot(aligned_buffer(self.shape.chunk_pages * page_bytes), SourceSlot(self.source)) for _ in range(3)]
        report = Repair()
        digests = []
        total = sum(chunk.pages for _, chunk in work) * page_bytes
        with (
            SourceReader(self.source, self.files) as reader,
            closing(read_ahead(work, slots, lambda slot, item: self._fill(reader, slot, *item))) as filled,
            Progress("examining", total) as progress,
        ):
            for (layer, chunk), slot in filled:
                values, scales = slot.source.values, slot.source.scales
                digests.append(slot.source.digest())
                page_format = self.formats[layer.layer]
                _, damaged = page_format.verify(chunk.first_page, chunk.pages, slot.pages)
                _, differing = page_format.compare(chunk.first_page, chunk.pages, slot.pages, values, scales)
                bad = {fault.page for fault in damaged} | {fault.page for fault in differing} | slot.missing
                report.bad += [(layer.layer, page) for page in sorted(bad)]
                report.pages += chunk.pages
                report.bytes += chunk.pages * page_bytes
                progress.advance(chunk.pages * page_bytes)
        return report, digests

    def _fill(self, reader: SourceReader, slot: _Slot, layer: Layer, chunk: Chunk) -> None:
        slot.missing = self._read_pages(layer, chunk.first_page, chunk.pages, slot.pages)
        reader.read_chunk(slot.source, self.layers[layer.layer], chunk)

    def _read_pages(self, layer: Layer, first: int, count: int, buffer: memoryview) -> set[int]:
        """Reads pages; those that the drive does not give are zeroed and returned."""
        page_bytes = self.manifest.page_bytes
        missing = set()
        for extent, target in self.manifest.striping(layer).pieces(first, count, buffer):
            path = layer.files[extent.file_index].path
            if self._read(path, target, extent.offset):
                continue
            for index in range(extent.pages):
                page = target[index * page_bytes : (index + 1) * page_bytes]
                if not self._read(path, page, extent.offset + index * page_bytes):
                    page[:] = bytes(page_bytes)
                    missing.add(extent.first_page + index)
        return missing

    def _read(self, path: str, target: memoryview, offset: int) -> bool:
        try:
            return self.files.read_at(self.fds[path], target, offset, path) == len(target)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO):
                raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
            return False

    def _rewrite(self, bad: list[tuple[int, int]]) -> None:
        """Writes the bad pages, makes them durable, reads them back and compares."""
        by_layer: dict[int, set[int]] = {}
        for number, page in bad:
            by_layer.setdefault(number, set()).add(page)
        buffer = aligned_buffer(self.manifest.page_bytes)
        with SourceReader(self.source, self.files) as reader, Progress("repairing", self._bytes(len(bad))) as progress:
            slot = SourceSlot(self.source)
            for layer in self.manifest.layers:
                for page in sorted(by_layer.get(layer.layer, ())):
                    self._make(reader, slot, self.layers[layer.layer], layer, page, buffer)
                    path, offset = self._place(layer, page)
                    try:
                        self.files.write_at(self.fds[path], buffer, offset, path)
                    except OSError as error:
                        raise explain(
                            error, path, f"page {page} cannot be written", "replace the drive and pack"
                        ) from None
                    progress.advance(self._bytes(1))
            self._sync()
            for layer in self.manifest.layers:
                for page in sorted(by_layer.get(layer.layer, ())):
                    self._make(reader, slot, self.layers[layer.layer], layer, page, buffer)
                    written = aligned_buffer(self.manifest.page_bytes)
                    path, _ = self._place(layer, page)
                    if self._read_pages(layer, page, 1, written) or written != buffer:
                        raise EngramdError(
                            f"{path}: page {page} of layer {layer.layer} is not what was just written: "
                            "the drive is failing; pack the table onto another"
                        )

    def _make(
        self, reader: SourceReader, slot: SourceSlot, source: SourceLayer, layer: Layer, page: int, out: memoryview
    ) -> None:
        """The page as it should be."""
        first_row = page * self.shape.rows_per_page
        rows = min(self.shape.rows_per_page, layer.rows - first_row)
        reader.read_chunk(slot, source, Chunk(page, 1, first_row, rows))
        self.formats[layer.layer].encode(page, 1, slot.values, slot.scales, out)

    def _place(self, layer: Layer, page: int) -> tuple[str, int]:
        file_index, offset = self.manifest.striping(layer).locate(page)
        return layer.files[file_index].path, offset

    def _sync(self) -> None:
        for path, fd in self.fds.items():
            try:
                self.files.fsync(fd)
            except OSError as error:
                raise EngramdError(f"{path}: cannot be made durable: {error.strerror}") from None

    def _bytes(self, pages: int) -> int:
        return pages * self.manifest.page_bytes

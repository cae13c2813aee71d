"""Rows of a checkpoint's tensors, read in large aligned pieces past the page cache."""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Iterator

from engramd.checkpoint.mapping import Segment, SourceLayer, SourcePart, TableSource
from engramd.errors import EngramdError
from engramd.table.files import ALIGNMENT_BYTES, Files, aligned_buffer
from engramd.table.geometry import Chunk, Geometry

MAX_OPEN_FILES = 64


class SourceSlot:
    """Buffers for one chunk's source bytes. After `read_chunk`, `values` and `scales` view them, tightly packed."""

    def __init__(self, source: TableSource) -> None:
        shape = Geometry(source.row_bytes)
        rows = shape.chunk_pages * shape.rows_per_page
        self.buffers = [aligned_buffer(part.row_bytes * rows + 2 * ALIGNMENT_BYTES) for part in source.parts]
        self.values: memoryview = self.buffers[0][:0]
        self.scales: memoryview | None = None

    def digest(self) -> bytes:
        """SHA-256 of the chunk's values, then its scales: what the table's identity is made of."""
        found = hashlib.sha256(self.values)
        if self.scales is not None:
            found.update(self.scales)
        return found.digest()


class SourceReader:
    """Reads chunks of one TableSource. Used by one thread at a time; close() frees the files."""

    def __init__(self, source: TableSource, files: Files) -> None:
        self._files = files
        self._open: dict[str, int] = {}  # in order of last use
        self._scratch: memoryview | None = None
        self._sizes = {shard.path: shard.size for shard in source.shards}

    def close(self) -> None:
        for fd in self._open.values():
            self._files.close(fd)
        self._open.clear()

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_chunk(self, slot: SourceSlot, layer: SourceLayer, chunk: Chunk) -> None:
        slot.values = self._read(layer.value, chunk, slot.buffers[0])
        slot.scales = self._read(layer.scale, chunk, slot.buffers[1]) if layer.scale else None

    def _read(self, part: SourcePart, chunk: Chunk, buffer: memoryview) -> memoryview:
        pieces = list(_pieces(part, chunk.first_row, chunk.rows))
        if len(pieces) == 1:
            return self._read_piece(*pieces[0], part.row_bytes, buffer)
        if self._scratch is None or len(self._scratch) < len(buffer):
            self._scratch = aligned_buffer(len(buffer))
        done = 0
        for segment, first, rows in pieces:
            piece = self._read_piece(segment, first, rows, part.row_bytes, self._scratch)
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return buffer[:done]

    def _read_piece(self, segment: Segment, first: int, rows: int, row_bytes: int, buffer: memoryview) -> memoryview:
        """Reads the whole blocks around the rows; the rows begin somewhere inside the first."""
        begin = segment.offset + first * row_bytes
        end = begin + rows * row_bytes
        block = begin // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        length = -(-(end - block) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        got = self._files.read_at(self._file(segment.path), buffer[:length], block, segment.path)
        if block + got < end:
            raise EngramdError(
                f"{segment.path}: ends at byte {block + got}, but rows up to byte {end} are needed: "
                "it was truncated while it was being read"
            )
        return buffer[begin - block : end - block]

    def _file(self, path: str) -> int:
        fd = self._open.pop(path, None)
        if fd is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self._files.close(self._open.pop(next(iter(self._open))))
            fd = self._files.open_direct(path, os.O_RDONLY)
        self._open[path] = fd
        return fd


def _pieces(part: SourcePart, first_row: int, rows: int) -> Iterator[tuple[Segment, int, int]]:
    """(segment, first row inside it, rows) of each segment that the rows touch."""
    at = max(0, bisect.bisect_right(part.starts, first_row) - 1)
    for start, segment in zip(part.starts[at:], part.segments[at:], strict=True):
        if start >= first_row + rows:
            break
        low = max(first_row, start)
        high = min(first_row + rows, start + segment.rows)
        if low < high:
            yield segment, low - start, high - low

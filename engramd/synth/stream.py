"""Writing a large file front to back, past the page cache, with one thread filling and one writing."""

from __future__ import annotations

import os

from engramd.table.files import ALIGNMENT_BYTES, Files, aligned_buffer
from engramd.table.pipeline import WriteBehind

BLOCK_BYTES = 16 << 20


class Stream:
    """Takes bytes in order and writes them in whole blocks; the unaligned end is written without O_DIRECT.

    Ask for `room()` and fill it, then `wrote()` says how much of it was used. A context manager; close() makes the file
    durable. Used by one thread.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._fd = files.open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._offset = 0  # in the file, of the current block
        self._used = 0  # bytes of the current block
        self._behind: WriteBehind[list[memoryview | int]] = WriteBehind(
            [[aligned_buffer(BLOCK_BYTES), 0] for _ in range(3)], self._write
        )
        self._slot: list[memoryview | int] | None = None

    def __enter__(self) -> Stream:
        self._behind.__enter__()
        self._slot = self._behind.take()
        return self

    def __exit__(self, *error: object) -> None:
        self._behind.__exit__(*error)
        self._files.close(self._fd)

    def _write(self, slot: list[memoryview | int]) -> None:
        buffer, offset = slot
        assert isinstance(buffer, memoryview)
        assert isinstance(offset, int)
        self._files.write_at(self._fd, buffer, offset, self._path)

    @property
    def _block(self) -> memoryview:
        assert self._slot is not None
        block = self._slot[0]
        assert isinstance(block, memoryview)
        return block

    def room(self) -> memoryview:
        """The unused rest of the current block; never empty."""
        return self._block[self._used :]

    def wrote(self, count_bytes: int) -> None:
        self._used += count_bytes
        if self._used == BLOCK_BYTES:
            assert self._slot is not None
            self._slot[1] = self._offset
            self._behind.give(self._slot)
            self._offset += BLOCK_BYTES
            self._used = 0
            self._slot = self._behind.take()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            self.wrote(count)
            view = view[count:]

    def close(self) -> None:
        """Writes what is left and makes the file durable."""
        self._behind.finish()
        rest = self._block[: self._used]
        aligned = len(rest) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._files.write_at(self._fd, rest[:aligned], self._offset, self._path)
        if aligned < len(rest):
            self._files.leave_direct_quietly(self._fd)
            self._files.write_at(self._fd, rest[aligned:], self._offset + aligned, self._path)
        self._files.fsync(self._fd)

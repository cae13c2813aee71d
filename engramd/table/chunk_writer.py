"""The writing thread's part of a pack: pages to their files, then, every few seconds, what makes them durable."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass

from engramd.checkpoint.mapping import SourceLayer
from engramd.table.codec import PageFormat
from engramd.table.files import Files
from engramd.table.geometry import Chunk, Striping
from engramd.table.journal import DigestLog
from engramd.table.publish import PlannedFile

_NO_CHUNK = Chunk(0, 0, 0, 0)


@dataclass(frozen=True)
class LayerPlan:
    """One layer of the generation in work."""

    source: SourceLayer
    format: PageFormat
    files: tuple[PlannedFile, ...]
    pages: int


@dataclass
class WriteSlot:
    """One encoded chunk on its way to the drive. `digest`: of its source's bytes."""

    buffer: memoryview
    plan: LayerPlan | None = None
    chunk: Chunk = _NO_CHUNK
    digest: bytes = b""


class ChunkWriter:
    """Writes chunks in order. `log` is given before the first; used by one thread at a time; close() frees the files.

    Once `sync_failed`, nothing more is to be synced: the kernel may have dropped the pages and would call the next sync
    a success.
    """

    def __init__(self, files: Files, striping: Striping, sync_interval_s: float) -> None:
        self._files = files
        self._striping = striping
        self._sync_interval_s = sync_interval_s
        self._fds: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._synced = time.monotonic()
        self.log: DigestLog | None = None
        self.sync_failed = False

    def write(self, slot: WriteSlot) -> None:
        """Writes one chunk and, where the interval has passed, makes all of them durable. Raises OSError."""
        plan, chunk = slot.plan, slot.chunk
        assert self.log is not None
        assert plan is not None
        for extent, data in self._striping.pieces(chunk.first_page, chunk.pages, slot.buffer):
            path = plan.files[extent.file_index].work_path
            if path not in self._fds:
                self._fds[path] = self._files.open_direct(path, os.O_WRONLY)
            try:
                self._files.write_at(self._fds[path], data, extent.offset, path)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
            self._dirty.add(path)
        self.log.add(slot.digest)
        if time.monotonic() - self._synced >= self._sync_interval_s:
            self.log.sync()
            self._synced = time.monotonic()

    def sync_data(self) -> None:
        """Makes what was written durable. Raises OSError."""
        try:
            for path in sorted(self._dirty):
                self._files.fdatasync(self._fds[path])
        except OSError:
            self.sync_failed = True
            raise
        self._dirty.clear()

    def close(self) -> None:
        for fd in self._fds.values():
            self._files.close(fd)


def try_sync(log: DigestLog, failure: BaseException) -> None:
    """Keeps what was written before a pack failed, where the drive still takes it."""
    if isinstance(failure, OSError) and failure.errno == errno.EIO:
        return
    with contextlib.suppress(OSError):  # the first failure is the one to report; unsynced chunks are written again
        log.sync()

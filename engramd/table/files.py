"""The file layer: every change that packing makes on disk goes through `Files`, so that tests can replace it.

Tests use it to refuse writes (full disks) and to drop what was not synced (power loss). Reads of large files are here
too: O_DIRECT where the file system allows it, buffered elsewhere, which is said once per directory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from engramd.errors import EngramdError

ALIGNMENT_BYTES = 4096
Notice = Callable[[str], None]


def aligned_buffer(size_bytes: int) -> memoryview:
    """Anonymous zeroed memory, aligned to pages and rounded up to them; lives as long as the view or a slice of it."""
    return memoryview(mmap.mmap(-1, max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES))


class Files:
    """The operating system's files. Methods raise OSError; safe from any number of threads."""

    def __init__(self, notice: Notice | None = None) -> None:
        self._notice = notice
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def notify(self, text: str) -> None:
        """Tells the person who waits something worth knowing."""
        if self._notice:
            self._notice(text)

    # Reading

    def open_direct(self, path: str, flags: int, mode: int = 0o644) -> int:
        """Opens with O_DIRECT, or without where the file system refuses it (and says so)."""
        try:
            return self.open(path, flags | os.O_DIRECT, mode)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._say_buffered(path)
        return self.open(path, flags, mode)

    def read_at(self, fd: int, buffer: memoryview, offset: int, path: str) -> int:
        """Fills an aligned buffer from an aligned offset; returns fewer bytes than its size only at the file's end."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(fd, [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.leave_direct(fd, path):
                    raise
                continue
            done += count
            if count == 0 or done % ALIGNMENT_BYTES:
                break  # O_DIRECT ends short of a block at the end of the file only
        return done

    def leave_direct(self, fd: int, path: str) -> bool:
        """Turns O_DIRECT off for an open file whose file system took it at open and refuses it now (and says so); False
        where it was off already."""
        if not self.leave_direct_quietly(fd):
            return False
        self._say_buffered(path)
        return True

    def leave_direct_quietly(self, fd: int) -> bool:
        """Turns O_DIRECT off for an open file, for its unaligned end; False where it was off already."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True

    def _say_buffered(self, path: str) -> None:
        with self._lock:
            directory = os.path.dirname(path)
            if directory not in self._said:
                self.notify(f"{directory}: the file system refuses O_DIRECT; using buffered reads and writes there")
            self._said.add(directory)

    # Changing

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o755)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    # Built from the above

    def write_at(self, fd: int, data: bytes | memoryview, offset: int, path: str) -> None:
        """Writes all of `data`. Under O_DIRECT data, size and offset are aligned."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            try:
                count = self.pwrite(fd, view[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.leave_direct(fd, path):
                    raise
                continue
            if done + count < len(view):  # cut short: go on at a block, where O_DIRECT can
                count = (done + count) // ALIGNMENT_BYTES * ALIGNMENT_BYTES - done
                if count <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            done += count

    def write_file(self, path: str, data: bytes) -> None:
        """Creates or replaces a small file and makes its content durable (its name is not, before its directory is)."""
        fd = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            done = 0
            while done < len(data):
                done += self.pwrite(fd, data[done:], done)
            self.fsync(fd)
        finally:
            self.close(fd)


def explain(error: OSError, path: str, doing: str, way_out: str) -> EngramdError:
    """One clear error for a failed file operation, ending in the way out. path: where the error names none ("": the
    text goes without). Where the operation is not permitted, the way out is another place."""
    if isinstance(error.filename, str | bytes):
        path = os.fsdecode(error.filename)
    path = f"{path}: " if path else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        way_out = f"give uid {os.geteuid()} the right to it, or name another directory"
    reasons = {
        errno.ENOSPC: "no space left on the drive",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file would be larger than the file system or the process's limit allows",
        errno.EIO: "the drive reports an error",
        errno.EROFS: "the file system is read-only",
    }
    code = error.errno or 0
    return EngramdError(f"{path}{doing}: {reasons.get(code, error.strerror or str(error))}; {way_out}")

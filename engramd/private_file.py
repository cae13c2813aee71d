"""Files for their owner's eyes alone, which appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A new file, mode 0600, that takes the place of `path` once the block has ended and its content is on the drive.

    Where the block raises, `path` stays as it was and nothing is left behind. Raises OSError.
    """
    partial = f"{path}.partial-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)  # left by a process of the same number that was killed
    # O_EXCL: in a folder that others may write to, nobody else's file is filled.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.rename(partial, path)
    except BaseException:
        os.unlink(partial)
        raise

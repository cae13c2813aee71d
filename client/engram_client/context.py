"""The two kinds of context manager here: what is closed at the end of a `with` block, and what is released."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closeable:
    """Base of classes with a close() that is harmless twice."""

    __slots__ = ()

    def close(self) -> None:
        """Gives everything back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Releasable:
    """Base of classes with a release() that is harmless twice."""

    __slots__ = ()

    def release(self) -> None:
        """Gives the room back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

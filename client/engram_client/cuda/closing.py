"""What device objects have in common: they are context managers, and close themselves when they are collected."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from .driver_base import GpuError


class Closing:
    """Base of what must give something back to the driver. A subclass's close() may be called again, and after an
    __init__ that did not get far."""

    def close(self) -> None:
        """Gives everything back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except GpuError:
            return  # the context is gone, at the end of the process

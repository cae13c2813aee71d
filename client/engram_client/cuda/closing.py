"""What device objects have in common: they are context managers, and close themselves when they are collected."""

from __future__ import annotations

from ..context import Closeable
from .driver_base import GpuError


class Closing(Closeable):
    """Base of what must give something back to the driver. A subclass's close() may be called again, and after an
    __init__ that did not get far."""

    def __del__(self) -> None:
        try:
            self.close()
        except GpuError:
            return  # the context is gone, at the end of the process

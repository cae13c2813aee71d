"""DeviceIds: row ids that lie in device memory, brought to the host before they are asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._native import ffi
from ..arrays import Ids
from .buffers import device_array
from .driver_base import Driver

_LEAST_BYTES = 1 << 16
_MOST_BYTES = 1 << 27


class DeviceIds:
    """Pinned host memory for ids, grown as needed, and the event that tells of their arrival. One thread at a time.

    The calls need the device to be current.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._memory = 0
        self._size_bytes = 0
        self._event = 0

    def copy(self, ids: Any, shape: tuple[int, ...] | None, dtype: Any, stream: int) -> Ids:
        """The ids as a host array, good until the next call; waits for all that `stream` was given before.

        shape, dtype: in the place of what the object says; needed with an address. Raises TypeError, ValueError,
        GpuError.
        """
        array = device_array(ids, "ids")
        known_shape = shape if shape is not None else array.shape
        known_dtype = np.dtype(dtype) if dtype is not None else array.dtype
        if known_shape is None or known_dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise TypeError(
                "ids in device memory must be int32 or int64 and tell their shape; give ids_shape and ids_dtype with "
                "an address"
            )
        size_bytes = math.prod(known_shape) * known_dtype.itemsize
        if size_bytes == 0:
            return np.empty(known_shape, known_dtype)
        if size_bytes > _MOST_BYTES:
            raise ValueError(f"{math.prod(known_shape)} ids are more than can be asked for at once")
        driver = self._driver
        self._make_room(size_bytes)
        driver.copy_to_host(self._memory, array.address, size_bytes, stream)
        driver.record_event(self._event, stream)
        driver.synchronize_event(self._event)
        memory = ffi.buffer(ffi.cast("char *", self._memory), size_bytes)
        return np.frombuffer(memory, known_dtype).reshape(known_shape)

    def _make_room(self, size_bytes: int) -> None:
        if not self._event:
            self._event = self._driver.create_event()
        if size_bytes > self._size_bytes:
            size_bytes = max(size_bytes, _LEAST_BYTES)
            self._free_memory()
            self._memory = self._driver.allocate_host(size_bytes)
            self._size_bytes = size_bytes

    def _free_memory(self) -> None:
        memory, self._memory, self._size_bytes = self._memory, 0, 0
        if memory:
            self._driver.free_host(memory)

    def free(self) -> None:
        """Gives memory and event back."""
        self._free_memory()
        event, self._event = self._event, 0
        if event:
            self._driver.destroy_event(event)

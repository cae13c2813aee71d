"""What callers pass as device memory and streams, by duck typing: torch, CuPy, JAX and friends, or plain addresses.

Nothing is imported for it. Sizes are checked where the object tells its size; a plain address is trusted.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np


class DeviceArray(NamedTuple):
    """Device memory of somebody else. nbytes, shape and dtype are None where only an address is known."""

    address: int
    nbytes: int | None
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None


def is_device_array(value: object) -> bool:
    """Whether the object lies in device memory (host tensors and arrays do not; a plain address counts as neither)."""
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "data_ptr"):
        return bool(getattr(value, "is_cuda", True))
    return hasattr(value, "__cuda_array_interface__")


def device_array(value: Any, what: str) -> DeviceArray:
    """Address and size of device memory. Raises ValueError where it is not contiguous or not on a device."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if value <= 0:
            raise ValueError(f"{what} must be a device address, not {value}")
        return DeviceArray(int(value), None, None, None)
    if hasattr(value, "data_ptr"):
        return _from_tensor(value, what)
    if hasattr(value, "__cuda_array_interface__"):
        return _from_interface(value.__cuda_array_interface__, what)
    raise ValueError(
        f"{what} must be device memory (data_ptr(), __cuda_array_interface__ or an address), not {type(value).__name__}"
    )


def _from_tensor(value: Any, what: str) -> DeviceArray:
    if not getattr(value, "is_cuda", True):
        raise ValueError(f"{what} is a tensor on {getattr(value, 'device', 'the host')}, not on a GPU")
    if hasattr(value, "is_contiguous") and not value.is_contiguous():
        raise ValueError(f"{what} must be contiguous")
    nbytes = value.numel() * value.element_size() if hasattr(value, "numel") else getattr(value, "nbytes", None)
    dtype = None
    name = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if name in ("int32", "int64"):
        dtype = np.dtype(name)
    shape = tuple(int(length) for length in value.shape) if hasattr(value, "shape") else None
    return DeviceArray(int(value.data_ptr()), nbytes, shape, dtype)


def _from_interface(interface: dict[str, Any], what: str) -> DeviceArray:
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is not None:
        expected = dtype.itemsize
        for length, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
            if length > 1 and stride != expected:
                raise ValueError(f"{what} must be contiguous")
            expected *= length
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return DeviceArray(int(interface["data"][0]), nbytes, shape, dtype)


def output_address(value: Any, size_bytes: int, what: str) -> int:
    """The address of memory for exactly `size_bytes`. Raises ValueError where the object says another size."""
    if type(value) is int and value > 0:
        return value
    array = device_array(value, what)
    if array.nbytes is not None and array.nbytes != size_bytes:
        raise ValueError(f"{what} has {array.nbytes} bytes, the rows have {size_bytes}")
    return array.address


def stream_handle(stream: Any, near: object = None) -> int:
    """The driver's handle of a stream: an integer, a torch or CuPy stream, anything with __cuda_stream__().

    None: torch's current stream where `near` is a torch tensor, else the default stream.
    """
    if type(stream) is int:
        return stream
    if stream is None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(near, torch.Tensor):
            return int(torch.cuda.current_stream(near.device).cuda_stream)
        return 0
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    raise ValueError(f"stream must be a stream's handle or an object that has one, not {type(stream).__name__}")

"""Driver: one device of one driver, behind one set of methods; cuda_driver.py and hip_driver.py fill it in.

Handles (contexts, streams, events) and addresses are plain integers throughout.
"""

from __future__ import annotations

import threading
from typing import Any

from cffi import FFI

from ..errors import EngramError

#: cuMemHostRegister / hipHostRegister: for all contexts, with a device address, never written by the device.
REGISTER_PORTABLE, REGISTER_MAPPED, REGISTER_READ_ONLY = 1, 2, 8
#: Operations of cuStreamBatchMemOp; a wait of flags 0 ends once (int32)(word - value) >= 0.
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2

# The numbers are the same in CUDA and HIP.
_HOST_ALLOC_PORTABLE_MAPPED = 3
_EVENT_DISABLE_TIMING = 2
_ERROR_NOT_READY = 600
_ERROR_DEINITIALIZED = 4


def text_of(ffi: FFI, characters: Any) -> str:
    """A driver's zero-terminated text."""
    text: Any = ffi.string(characters)
    return str(text.decode("utf-8", "replace"))


class GpuError(EngramError):
    """The GPU's driver refused something. code and name are its own (0 and "" where there is no driver at all)."""

    def __init__(self, text: str, code: int = 0, name: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.name = name


class _Scratch(threading.local):
    """Where the driver writes its answers, of each thread: making such a place costs as much as a call.

    One for each question, since a garbage collection may ask another between a call and the look at its answer.
    """

    def __init__(self, ffi: FFI) -> None:
        self.capturing: Any = ffi.new("int *")
        self.device: Any = ffi.new("int *")
        self.context: Any = ffi.new("uintptr_t *")
        self.popped: Any = ffi.new("uintptr_t *")
        self.before = 0  # HIP: the device that enter() has replaced


class Driver:
    """One device of one driver. Made by open_driver(); may be used from any thread.

    The methods act in the device's primary context, which callers make current with enter() and leave(). Those of every
    batch check codes before they call check(), and make no object.
    """

    kind: str
    has_stream_waits: bool

    def __init__(self, ffi: FFI, library: Any, device: int) -> None:
        self.device = device
        self._ffi = ffi
        self._library = library
        self._scratch = _Scratch(ffi)

    # The library's functions under common names; each subclass fills them in.
    _register: Any
    _unregister: Any
    _device_pointer: Any
    _host_alloc: Any
    _host_free: Any
    _alloc: Any
    _free: Any
    _to_device: Any
    _to_host: Any
    _stream_create: Any
    _stream_destroy: Any
    _stream_synchronize: Any
    _is_capturing: Any
    _event_create: Any
    _event_destroy: Any
    _event_record: Any
    _event_query: Any
    _event_synchronize: Any

    def describe(self, code: int) -> tuple[str, str]:
        """The driver's own name and text of an error code."""
        raise NotImplementedError

    def check(self, code: int, what: str) -> None:
        """Raises GpuError where a call did not succeed."""
        if code:
            name, text = self.describe(code)
            raise GpuError(f"{what} failed on {self}: {name} ({code}): {text}", code, name)

    def __str__(self) -> str:
        return f"{self.kind}:{self.device}"

    def enter(self) -> bool:
        """Makes the device current for this thread; the result goes to leave()."""
        raise NotImplementedError

    def leave(self, entered: bool) -> None:
        """Restores what was current before enter()."""
        raise NotImplementedError

    def can_register_read_only(self) -> bool:
        """Whether memory that is mapped without write permission can be registered."""
        raise NotImplementedError

    def register(self, address: int, size_bytes: int, flags: int) -> None:
        """Pins a range of host memory and makes it known to the device."""
        self.check(self._register(address, size_bytes, flags), f"registering {size_bytes} bytes of shared memory")

    def unregister(self, address: int) -> None:
        """Undoes register(). Says nothing where the driver is gone already, at the end of the process."""
        code = self._unregister(address)
        if code != _ERROR_DEINITIALIZED:
            self.check(code, "unregistering shared memory")

    def device_pointer(self, address: int) -> int:
        """The device's address of registered host memory."""
        result = self._ffi.new("uintptr_t *")
        self.check(self._device_pointer(result, address, 0), "asking for the device address of shared memory")
        return int(result[0])

    def allocate_host(self, size_bytes: int) -> int:
        """Pinned host memory, known to the device."""
        result = self._ffi.new("uintptr_t *")
        self.check(self._host_alloc(result, size_bytes, _HOST_ALLOC_PORTABLE_MAPPED), "allocating pinned memory")
        return int(result[0])

    def free_host(self, address: int) -> None:
        """Gives back memory of allocate_host()."""
        self._host_free(address)

    def allocate(self, size_bytes: int) -> int:
        """Device memory."""
        result = self._ffi.new("uintptr_t *")
        self.check(self._alloc(result, size_bytes), f"allocating {size_bytes} bytes of device memory")
        return int(result[0])

    def free(self, address: int) -> None:
        """Gives back memory of allocate()."""
        self._free(address)

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueues one copy from host memory."""
        code = self._to_device(target, source, size_bytes, stream)
        if code:
            self.check(code, f"copying {size_bytes} bytes to the device")

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueues one copy from device memory."""
        code = self._to_host(target, source, size_bytes, stream)
        if code:
            self.check(code, f"copying {size_bytes} bytes to the host")

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream."""
        result = self._ffi.new("uintptr_t *")
        self.check(self._stream_create(result, 1), "creating a stream")
        return int(result[0])

    def destroy_stream(self, stream: int) -> None:
        """Destroys it once its work is done."""
        self._stream_destroy(stream)

    def synchronize_stream(self, stream: int) -> None:
        """Waits until all that was enqueued is done."""
        self.check(self._stream_synchronize(stream), "waiting for a stream")

    def is_capturing(self, stream: int) -> bool:
        """Whether what is enqueued now goes into a graph."""
        result = self._scratch.capturing
        code = self._is_capturing(stream, result)
        if code:
            self.check(code, "asking whether a stream is being captured")
        return bool(result[0])

    def create_event(self) -> int:
        """An event without timing."""
        result = self._ffi.new("uintptr_t *")
        self.check(self._event_create(result, _EVENT_DISABLE_TIMING), "creating an event")
        return int(result[0])

    def destroy_event(self, event: int) -> None:
        """Destroys it."""
        self._event_destroy(event)

    def record_event(self, event: int, stream: int) -> None:
        """The event happens when all that is in the stream now is done."""
        code = self._event_record(event, stream)
        if code:
            self.check(code, "recording an event")

    def has_happened(self, event: int) -> bool:
        """Whether a recorded event has happened."""
        code = self._event_query(event)
        if code == _ERROR_NOT_READY:
            return False
        if code:
            self.check(code, "asking for an event")
        return True

    def synchronize_event(self, event: int) -> None:
        """Waits for a recorded event."""
        code = self._event_synchronize(event)
        if code:
            self.check(code, "waiting for an event")

    # Stream mode; only where has_stream_waits.

    def copy_any(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueues one copy between any two device addresses, host memory by its device address included."""
        raise NotImplementedError

    def memory_operations(self, operations: list[tuple[int, int, int]]) -> Any:
        """A prepared batch of (operation, device address, value) for run_memory_operations()."""
        raise NotImplementedError

    def run_memory_operations(self, stream: int, batch: Any) -> None:
        """Enqueues a prepared batch."""
        raise NotImplementedError

"""libamdhip64.so: the entry points that are used, and the methods of Driver over them."""

from __future__ import annotations

from typing import Any

from cffi import FFI

from .driver_base import Driver, text_of

HIP_DECLARATIONS = """
int hipInit(unsigned);
const char *hipGetErrorName(int);
const char *hipGetErrorString(int);
int hipGetDevice(int *);
int hipSetDevice(int);
int hipHostRegister(uintptr_t, size_t, unsigned);
int hipHostUnregister(uintptr_t);
int hipHostGetDevicePointer(uintptr_t *, uintptr_t, unsigned);
int hipHostMalloc(uintptr_t *, size_t, unsigned);
int hipHostFree(uintptr_t);
int hipMalloc(uintptr_t *, size_t);
int hipFree(uintptr_t);
int hipMemcpyHtoDAsync(uintptr_t, uintptr_t, size_t, uintptr_t);
int hipMemcpyDtoHAsync(uintptr_t, uintptr_t, size_t, uintptr_t);
int hipStreamCreateWithFlags(uintptr_t *, unsigned);
int hipStreamDestroy(uintptr_t);
int hipStreamSynchronize(uintptr_t);
int hipStreamIsCapturing(uintptr_t, int *);
int hipEventCreateWithFlags(uintptr_t *, unsigned);
int hipEventDestroy(uintptr_t);
int hipEventRecord(uintptr_t, uintptr_t);
int hipEventQuery(uintptr_t);
int hipEventSynchronize(uintptr_t);
"""


class HipDriver(Driver):
    """libamdhip64.so. Waiting inside a stream needs signal memory there, which shared memory is not: host wait only."""

    kind = "hip"
    has_stream_waits = False

    def __init__(self, ffi: FFI, library: Any, device: int) -> None:
        super().__init__(ffi, library, device)
        self._register = library.hipHostRegister
        self._unregister = library.hipHostUnregister
        self._device_pointer = library.hipHostGetDevicePointer
        self._host_alloc = library.hipHostMalloc
        self._host_free = library.hipHostFree
        self._alloc = library.hipMalloc
        self._free = library.hipFree
        self._to_device = library.hipMemcpyHtoDAsync
        self._to_host = library.hipMemcpyDtoHAsync
        self._stream_create = library.hipStreamCreateWithFlags
        self._stream_destroy = library.hipStreamDestroy
        self._stream_synchronize = library.hipStreamSynchronize
        self._is_capturing = library.hipStreamIsCapturing
        self._event_create = library.hipEventCreateWithFlags
        self._event_destroy = library.hipEventDestroy
        self._event_record = library.hipEventRecord
        self._event_query = library.hipEventQuery
        self._event_synchronize = library.hipEventSynchronize
        self.check(library.hipInit(0), "initialising the driver")
        self.leave(self.enter())

    def describe(self, code: int) -> tuple[str, str]:
        texts = (self._library.hipGetErrorName(code), self._library.hipGetErrorString(code))
        name, text = ("unknown error" if text == self._ffi.NULL else text_of(self._ffi, text) for text in texts)
        return name, text

    def enter(self) -> bool:
        current = self._scratch.device
        code = self._library.hipGetDevice(current)
        if code:
            self.check(code, "asking for the current device")
        if current[0] == self.device:
            return False
        self._scratch.before = int(current[0])
        self.check(self._library.hipSetDevice(self.device), f"opening device {self.device}")
        return True

    def leave(self, entered: bool) -> None:
        if entered:
            self._library.hipSetDevice(self._scratch.before)

    def can_register_read_only(self) -> bool:
        return True  # there is no attribute to ask; registering itself says so

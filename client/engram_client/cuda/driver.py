"""The GPU's driver library, opened at run time: libcuda.so.1, or libamdhip64.so where that is what there is.

About thirty entry points of the driver API behind one set of methods, so that the rest of the package does not know
which of the two it talks to. No CUDA package is needed to import or install this; where no driver is installed,
open_driver() raises GpuError.

Handles (contexts, streams, events) and addresses are plain integers throughout.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from cffi import FFI

from ..errors import EngramError

#: cuMemHostRegister / hipHostRegister: for all contexts, with a device address, never written by the device.
REGISTER_PORTABLE, REGISTER_MAPPED, REGISTER_READ_ONLY = 1, 2, 8
#: Operations of cuStreamBatchMemOp; a wait of flags 0 ends once (int32)(word - value) >= 0.
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2

_HOST_ALLOC_PORTABLE_MAPPED = 3
_EVENT_DISABLE_TIMING = 2
_CUDA_ERROR_NOT_READY = _HIP_ERROR_NOT_READY = 600
_CUDA_ERROR_DEINITIALIZED = 4
_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99
_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113

_CUDA_DECLARATIONS = """
int cuInit(unsigned);
int cuGetErrorName(int, const char **);
int cuGetErrorString(int, const char **);
int cuDeviceGet(int *, int);
int cuDeviceGetAttribute(int *, int, int);
int cuDevicePrimaryCtxRetain(uintptr_t *, int);
int cuCtxGetCurrent(uintptr_t *);
int cuCtxPushCurrent_v2(uintptr_t);
int cuCtxPopCurrent_v2(uintptr_t *);
int cuMemHostRegister_v2(uintptr_t, size_t, unsigned);
int cuMemHostUnregister(uintptr_t);
int cuMemHostGetDevicePointer_v2(uintptr_t *, uintptr_t, unsigned);
int cuMemHostAlloc(uintptr_t *, size_t, unsigned);
int cuMemFreeHost(uintptr_t);
int cuMemAlloc_v2(uintptr_t *, size_t);
int cuMemFree_v2(uintptr_t);
int cuMemcpyHtoDAsync_v2(uintptr_t, uintptr_t, size_t, uintptr_t);
int cuMemcpyDtoHAsync_v2(uintptr_t, uintptr_t, size_t, uintptr_t);
int cuMemcpyAsync(uintptr_t, uintptr_t, size_t, uintptr_t);
int cuStreamCreate(uintptr_t *, unsigned);
int cuStreamDestroy_v2(uintptr_t);
int cuStreamSynchronize(uintptr_t);
int cuStreamIsCapturing(uintptr_t, int *);
int cuStreamBatchMemOp_v2(uintptr_t, unsigned, void *, unsigned);
int cuEventCreate(uintptr_t *, unsigned);
int cuEventDestroy_v2(uintptr_t);
int cuEventRecord(uintptr_t, uintptr_t);
int cuEventQuery(uintptr_t);
int cuEventSynchronize(uintptr_t);
/* CUstreamBatchMemOpParams: a union of 48 bytes, whose members for waits and writes begin alike. */
typedef struct { uint32_t operation; uint64_t address; uint64_t value; uint32_t flags; uint64_t alias; uint64_t pad; }
  memory_operation;
"""

_HIP_DECLARATIONS = """
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


def _text(ffi: FFI, characters: Any) -> str:
    text: Any = ffi.string(characters)
    return str(text.decode("utf-8", "replace"))


class GpuError(EngramError):
    """The GPU's driver refused something. code and name are its own (0 and "" where there is no driver at all)."""

    def __init__(self, text: str, code: int = 0, name: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.name = name


class Driver:
    """One device of one driver. Made by open_driver(); may be used from any thread.

    The methods act in the device's primary context, which callers make current with enter() and leave().
    """

    kind: str
    has_stream_waits: bool

    def __init__(self, ffi: FFI, library: Any, device: int) -> None:
        self.device = device
        self._ffi = ffi
        self._library = library

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
        if code != _CUDA_ERROR_DEINITIALIZED:
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
        result = self._ffi.new("int *")
        self.check(self._is_capturing(stream, result), "asking whether a stream is being captured")
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
        if code == _CUDA_ERROR_NOT_READY:
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


class CudaDriver(Driver):
    """libcuda.so.1."""

    kind = "cuda"
    has_stream_waits = True

    def __init__(self, ffi: FFI, library: Any, device: int) -> None:
        super().__init__(ffi, library, device)
        self._register = library.cuMemHostRegister_v2
        self._unregister = library.cuMemHostUnregister
        self._device_pointer = library.cuMemHostGetDevicePointer_v2
        self._host_alloc = library.cuMemHostAlloc
        self._host_free = library.cuMemFreeHost
        self._alloc = library.cuMemAlloc_v2
        self._free = library.cuMemFree_v2
        self._to_device = library.cuMemcpyHtoDAsync_v2
        self._to_host = library.cuMemcpyDtoHAsync_v2
        self._stream_create = library.cuStreamCreate
        self._stream_destroy = library.cuStreamDestroy_v2
        self._stream_synchronize = library.cuStreamSynchronize
        self._is_capturing = library.cuStreamIsCapturing
        self._event_create = library.cuEventCreate
        self._event_destroy = library.cuEventDestroy_v2
        self._event_record = library.cuEventRecord
        self._event_query = library.cuEventQuery
        self._event_synchronize = library.cuEventSynchronize
        self._get_current = library.cuCtxGetCurrent
        self.check(library.cuInit(0), "initialising the driver")
        handle = ffi.new("int *")
        self.check(library.cuDeviceGet(handle, device), f"opening device {device}")
        self._handle = int(handle[0])
        context = ffi.new("uintptr_t *")
        # Never released: the process's other users of the device share the primary context.
        self.check(library.cuDevicePrimaryCtxRetain(context, self._handle), f"making device {device}'s context")
        self._context = int(context[0])
        self._scratch = threading.local()

    def describe(self, code: int) -> tuple[str, str]:
        texts = []
        for ask in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            result = self._ffi.new("const char **")
            failed = ask(code, result) or result[0] == self._ffi.NULL
            texts.append("unknown error" if failed else _text(self._ffi, result[0]))
        return texts[0], texts[1]

    def enter(self) -> bool:
        scratch = self._scratch
        try:
            current = scratch.current
        except AttributeError:
            current = scratch.current = self._ffi.new("uintptr_t *")
        self.check(self._get_current(current), "asking for the current context")
        if current[0] == self._context:
            return False
        self.check(self._library.cuCtxPushCurrent_v2(self._context), "making the device current")
        return True

    def leave(self, entered: bool) -> None:
        if entered:
            self._library.cuCtxPopCurrent_v2(self._ffi.new("uintptr_t *"))

    def _attribute(self, attribute: int) -> int:
        result = self._ffi.new("int *")
        self.check(self._library.cuDeviceGetAttribute(result, attribute, self._handle), "asking for an attribute")
        return int(result[0])

    def can_register_read_only(self) -> bool:
        return all(
            self._attribute(attribute)
            for attribute in (_ATTRIBUTE_HOST_REGISTER_SUPPORTED, _ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)
        )

    def copy_any(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.check(self._library.cuMemcpyAsync(target, source, size_bytes, stream), f"copying {size_bytes} bytes")

    def memory_operations(self, operations: list[tuple[int, int, int]]) -> Any:
        return self._ffi.new(
            "memory_operation[]", [(operation, address, value, 0, 0, 0) for operation, address, value in operations]
        )

    def run_memory_operations(self, stream: int, batch: Any) -> None:
        code = self._library.cuStreamBatchMemOp_v2(stream, len(batch), batch, 0)
        self.check(code, f"enqueueing {len(batch)} memory operations")


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
        self._scratch = threading.local()
        self.leave(self.enter())

    def describe(self, code: int) -> tuple[str, str]:
        texts = (self._library.hipGetErrorName(code), self._library.hipGetErrorString(code))
        name, text = ("unknown error" if text == self._ffi.NULL else _text(self._ffi, text) for text in texts)
        return name, text

    def enter(self) -> bool:
        current = self._ffi.new("int *")
        self.check(self._library.hipGetDevice(current), "asking for the current device")
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


_LIBRARIES: dict[str, tuple[tuple[str, ...], str, type[Driver]]] = {
    "cuda": (("libcuda.so.1",), _CUDA_DECLARATIONS, CudaDriver),
    "hip": (("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"), _HIP_DECLARATIONS, HipDriver),
}


def parse_device(device: object) -> tuple[str | None, int]:
    """(kind or None, number) of 1, "cuda:1", "hip:0" or a torch.device. Raises ValueError."""
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return None, device
    kind, _, number = str(device).partition(":")
    if kind not in ("cuda", "hip") or (number and not number.isdigit()):
        raise ValueError(f"device must be a number, 'cuda:N', 'hip:N' or a torch.device, not {device!r}")
    if not isinstance(device, str):
        torch = sys.modules.get("torch")
        # torch says "cuda" on AMD devices too.
        if torch is not None and getattr(torch.version, "hip", None):
            kind = "hip"
        if not number:
            number = str(torch.cuda.current_device()) if torch is not None else "0"
    return kind, int(number or 0)


def open_driver(device: object = 0) -> Driver:
    """The driver of a device: a number, "cuda:N", "hip:N" or a torch.device. A plain number tries CUDA first.

    Raises GpuError where no driver is installed or it has no such device, ValueError where `device` names none.
    """
    kind, number = parse_device(device)
    return _open(kind, number)


@functools.cache
def _open(kind: str | None, number: int) -> Driver:
    missing = []
    for name in (kind,) if kind is not None else tuple(_LIBRARIES):
        files, declarations, make = _LIBRARIES[name]
        ffi = FFI()
        ffi.cdef(declarations)
        for file in files:
            try:
                library = ffi.dlopen(file)
            except OSError as error:
                missing.append(str(error))
                continue
            try:
                return make(ffi, library, number)
            except AttributeError as error:
                raise GpuError(f"{file} is too old: {error}") from None
    raise GpuError(f"no GPU driver is installed here: {'; '.join(missing)}")

"""libcuda.so.1: the entry points that are used, and the methods of Driver over them."""

from __future__ import annotations

from typing import Any

from cffi import FFI

from .driver_base import Driver, text_of

_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99
_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113

CUDA_DECLARATIONS = """
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

    def describe(self, code: int) -> tuple[str, str]:
        texts = []
        for ask in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            result = self._ffi.new("const char **")
            failed = ask(code, result) or result[0] == self._ffi.NULL
            texts.append("unknown error" if failed else text_of(self._ffi, result[0]))
        return texts[0], texts[1]

    def enter(self) -> bool:
        current = self._scratch.context
        code = self._get_current(current)
        if code:
            self.check(code, "asking for the current context")
        if current[0] == self._context:
            return False
        self.check(self._library.cuCtxPushCurrent_v2(self._context), "making the device current")
        return True

    def leave(self, entered: bool) -> None:
        if entered:
            self._library.cuCtxPopCurrent_v2(self._scratch.popped)

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

// The double's face as libamdhip64.so: the entry points that the client uses.
#include "fake_gpu.h"

using fake_gpu::Gpu;

namespace {
thread_local int current_device = 0;

int enter(const char* function) {
  return Gpu::instance().call(function);
}

}  // namespace

extern "C" {

int hipInit(unsigned) {
  return Gpu::instance().call(__func__);
}
const char* hipGetErrorName(int code) {
  switch (code) {
    case fake_gpu::kInvalidValue:
      return "hipErrorInvalidValue";
    case fake_gpu::kOutOfMemory:
      return "hipErrorOutOfMemory";
    case fake_gpu::kInvalidHandle:
      return "hipErrorInvalidHandle";
    case fake_gpu::kNotSupported:
      return "hipErrorNotSupported";
    case fake_gpu::kAlreadyRegistered:
      return "hipErrorHostMemoryAlreadyRegistered";
    case 101:
      return "hipErrorInvalidDevice";
    default:
      return "hipErrorUnknown";
  }
}
const char* hipGetErrorString(int) {
  return "the double says so";
}
int hipGetDevice(int* result) {
  *result = current_device;
  return Gpu::instance().call(__func__);
}
int hipSetDevice(int device) {
  if (const int code = Gpu::instance().call(__func__)) return code;
  if (device < 0 || device > 1) return 101;
  current_device = device;
  return 0;
}
FORWARD(hipHostRegister, register_host, (uint64_t address, size_t bytes, unsigned flags), (address, bytes, flags))
FORWARD(hipHostUnregister, unregister_host, (uint64_t address), (address))
FORWARD(hipHostGetDevicePointer, device_pointer, (uint64_t * result, uint64_t address, unsigned), (result, address))
FORWARD(hipHostMalloc, allocate_host, (uint64_t * result, size_t bytes, unsigned), (result, bytes))
FORWARD(hipHostFree, free_host, (uint64_t address), (address))
FORWARD(hipMalloc, allocate, (uint64_t * result, size_t bytes), (result, bytes))
FORWARD(hipFree, free, (uint64_t address), (address))
FORWARD(hipMemcpyHtoDAsync, copy_to_device, (uint64_t target, uint64_t source, size_t bytes, uint64_t stream),
        (target, source, bytes, stream))
FORWARD(hipMemcpyDtoHAsync, copy_to_host, (uint64_t target, uint64_t source, size_t bytes, uint64_t stream),
        (target, source, bytes, stream))
FORWARD(hipStreamCreateWithFlags, create_stream, (uint64_t * result, unsigned), (result))
FORWARD(hipStreamDestroy, destroy_stream, (uint64_t stream), (stream))
FORWARD(hipStreamSynchronize, synchronize_stream, (uint64_t stream), (stream))
FORWARD(hipStreamIsCapturing, is_capturing, (uint64_t stream, int* result), (stream, result))
FORWARD(hipEventCreateWithFlags, create_event, (uint64_t * result, unsigned), (result))
FORWARD(hipEventDestroy, destroy_event, (uint64_t event), (event))
FORWARD(hipEventRecord, record_event, (uint64_t event, uint64_t stream), (event, stream))
FORWARD(hipEventQuery, query_event, (uint64_t event), (event))
FORWARD(hipEventSynchronize, synchronize_event, (uint64_t event), (event))

}  // extern "C"

// The double's face as libamdhip64.so: the entry points that the client uses.
#include "fake_gpu.h"

using fake_gpu::Gpu;

namespace {
thread_local int current_device = 0;
}

#define ENTER                                                       \
  if (const int code = Gpu::instance().call(__func__)) return code; \
  Gpu& gpu = Gpu::instance()

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
int hipHostRegister(uint64_t address, size_t bytes, unsigned flags) {
  ENTER;
  return gpu.register_host(address, bytes, flags);
}
int hipHostUnregister(uint64_t address) {
  ENTER;
  return gpu.unregister_host(address);
}
int hipHostGetDevicePointer(uint64_t* result, uint64_t address, unsigned) {
  ENTER;
  return gpu.device_pointer(result, address);
}
int hipHostMalloc(uint64_t* result, size_t bytes, unsigned) {
  ENTER;
  return gpu.allocate_host(result, bytes);
}
int hipHostFree(uint64_t address) {
  ENTER;
  return gpu.free_host(address);
}
int hipMalloc(uint64_t* result, size_t bytes) {
  ENTER;
  return gpu.allocate(result, bytes);
}
int hipFree(uint64_t address) {
  ENTER;
  return gpu.free(address);
}
int hipMemcpyHtoDAsync(uint64_t target, uint64_t source, size_t bytes, uint64_t stream) {
  ENTER;
  return gpu.copy_to_device(target, source, bytes, stream);
}
int hipMemcpyDtoHAsync(uint64_t target, uint64_t source, size_t bytes, uint64_t stream) {
  ENTER;
  return gpu.copy_to_host(target, source, bytes, stream);
}
int hipStreamCreateWithFlags(uint64_t* result, unsigned) {
  ENTER;
  return gpu.create_stream(result);
}
int hipStreamDestroy(uint64_t stream) {
  ENTER;
  return gpu.destroy_stream(stream);
}
int hipStreamSynchronize(uint64_t stream) {
  ENTER;
  return gpu.synchronize_stream(stream);
}
int hipStreamIsCapturing(uint64_t stream, int* result) {
  ENTER;
  return gpu.is_capturing(stream, result);
}
int hipEventCreateWithFlags(uint64_t* result, unsigned) {
  ENTER;
  return gpu.create_event(result);
}
int hipEventDestroy(uint64_t event) {
  ENTER;
  return gpu.destroy_event(event);
}
int hipEventRecord(uint64_t event, uint64_t stream) {
  ENTER;
  return gpu.record_event(event, stream);
}
int hipEventQuery(uint64_t event) {
  ENTER;
  return gpu.query_event(event);
}
int hipEventSynchronize(uint64_t event) {
  ENTER;
  return gpu.synchronize_event(event);
}

}  // extern "C"

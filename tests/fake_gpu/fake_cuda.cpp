// The double's face as libcuda.so.1: the entry points that the client uses, and those of graphs that the tests use.
#include "fake_gpu.h"

using fake_gpu::Gpu;

namespace {

constexpr uint64_t kContext = 0xC0;
thread_local uint64_t current_context = 0;

// Calls that act in a context need one, as in the real driver.
int enter(const char* function) {
  if (const int code = Gpu::instance().call(function)) return code;
  return current_context == kContext ? 0 : fake_gpu::kInvalidContext;
}

}  // namespace

#define ENTER                                        \
  if (const int code = enter(__func__)) return code; \
  Gpu& gpu = Gpu::instance()

extern "C" {

int cuInit(unsigned) {
  return Gpu::instance().call(__func__);
}
int cuGetErrorName(int code, const char** result) {
  switch (code) {
    case fake_gpu::kInvalidValue:
      *result = "CUDA_ERROR_INVALID_VALUE";
      return 0;
    case fake_gpu::kOutOfMemory:
      *result = "CUDA_ERROR_OUT_OF_MEMORY";
      return 0;
    case fake_gpu::kInvalidContext:
      *result = "CUDA_ERROR_INVALID_CONTEXT";
      return 0;
    case fake_gpu::kInvalidHandle:
      *result = "CUDA_ERROR_INVALID_HANDLE";
      return 0;
    case fake_gpu::kAlreadyRegistered:
      *result = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
      return 0;
    case fake_gpu::kNotRegistered:
      *result = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
      return 0;
    case fake_gpu::kNotSupported:
      *result = "CUDA_ERROR_NOT_SUPPORTED";
      return 0;
    case fake_gpu::kCaptureUnsupported:
      *result = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
      return 0;
    case 101:
      *result = "CUDA_ERROR_INVALID_DEVICE";
      return 0;
    case 700:
      *result = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return 0;
    default:
      *result = nullptr;
      return fake_gpu::kInvalidValue;
  }
}
int cuGetErrorString(int code, const char** result) {
  if (cuGetErrorName(code, result) != 0) return fake_gpu::kInvalidValue;
  *result = "the double says so";
  return 0;
}
int cuDeviceGet(int* result, int device) {
  if (const int code = Gpu::instance().call(__func__)) return code;
  if (device < 0 || device > 1) return 101;
  *result = device;
  return 0;
}
int cuDeviceGetAttribute(int* result, int attribute, int) {
  if (const int code = Gpu::instance().call(__func__)) return code;
  *result = attribute == 113 ? Gpu::instance().option("no_read_only") == 0 : attribute == 99;
  return 0;
}
int cuDevicePrimaryCtxRetain(uint64_t* result, int) {
  *result = kContext;
  return Gpu::instance().call(__func__);
}
int cuCtxGetCurrent(uint64_t* result) {
  *result = current_context;
  return Gpu::instance().call(__func__);
}
int cuCtxPushCurrent_v2(uint64_t context) {
  current_context = context;
  return Gpu::instance().call(__func__);
}
int cuCtxPopCurrent_v2(uint64_t* result) {
  *result = current_context;
  current_context = 0;
  return Gpu::instance().call(__func__);
}
int cuMemHostRegister_v2(uint64_t address, size_t bytes, unsigned flags) {
  ENTER;
  return gpu.register_host(address, bytes, flags);
}
int cuMemHostUnregister(uint64_t address) {
  ENTER;
  return gpu.unregister_host(address);
}
int cuMemHostGetDevicePointer_v2(uint64_t* result, uint64_t address, unsigned) {
  ENTER;
  return gpu.device_pointer(result, address);
}
int cuMemHostAlloc(uint64_t* result, size_t bytes, unsigned) {
  ENTER;
  return gpu.allocate_host(result, bytes);
}
int cuMemFreeHost(uint64_t address) {
  ENTER;
  return gpu.free_host(address);
}
int cuMemAlloc_v2(uint64_t* result, size_t bytes) {
  ENTER;
  return gpu.allocate(result, bytes);
}
int cuMemFree_v2(uint64_t address) {
  ENTER;
  return gpu.free(address);
}
int cuMemcpyHtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, uint64_t stream) {
  ENTER;
  return gpu.copy_to_device(target, source, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(uint64_t target, uint64_t source, size_t bytes, uint64_t stream) {
  ENTER;
  return gpu.copy_to_host(target, source, bytes, stream);
}
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t bytes, uint64_t stream) {
  ENTER;
  return gpu.copy_any(target, source, bytes, stream);
}
int cuStreamCreate(uint64_t* result, unsigned) {
  ENTER;
  return gpu.create_stream(result);
}
int cuStreamDestroy_v2(uint64_t stream) {
  ENTER;
  return gpu.destroy_stream(stream);
}
int cuStreamSynchronize(uint64_t stream) {
  ENTER;
  return gpu.synchronize_stream(stream);
}
int cuStreamIsCapturing(uint64_t stream, int* result) {
  ENTER;
  return gpu.is_capturing(stream, result);
}
int cuStreamBatchMemOp_v2(uint64_t stream, unsigned count, const fake_gpu::MemoryOperation* operations, unsigned) {
  ENTER;
  return gpu.memory_operations(stream, count, operations);
}
int cuStreamBeginCapture_v2(uint64_t stream, int) {
  ENTER;
  return gpu.begin_capture(stream);
}
int cuStreamEndCapture(uint64_t stream, uint64_t* graph) {
  ENTER;
  return gpu.end_capture(stream, graph);
}
int cuGraphInstantiateWithFlags(uint64_t* result, uint64_t graph, uint64_t) {
  *result = graph;
  return Gpu::instance().call(__func__);
}
int cuGraphLaunch(uint64_t graph, uint64_t stream) {
  ENTER;
  return gpu.launch(graph, stream);
}
int cuGraphExecDestroy(uint64_t graph) {
  ENTER;
  return gpu.destroy_graph(graph);
}
int cuGraphDestroy(uint64_t) {
  return Gpu::instance().call(__func__);
}
int cuEventCreate(uint64_t* result, unsigned) {
  ENTER;
  return gpu.create_event(result);
}
int cuEventDestroy_v2(uint64_t event) {
  ENTER;
  return gpu.destroy_event(event);
}
int cuEventRecord(uint64_t event, uint64_t stream) {
  ENTER;
  return gpu.record_event(event, stream);
}
int cuEventQuery(uint64_t event) {
  ENTER;
  return gpu.query_event(event);
}
int cuEventSynchronize(uint64_t event) {
  ENTER;
  return gpu.synchronize_event(event);
}

}  // extern "C"

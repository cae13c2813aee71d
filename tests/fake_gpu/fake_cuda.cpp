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
FORWARD(cuMemHostRegister_v2, register_host, (uint64_t address, size_t bytes, unsigned flags), (address, bytes, flags))
FORWARD(cuMemHostUnregister, unregister_host, (uint64_t address), (address))
FORWARD(cuMemHostGetDevicePointer_v2, device_pointer, (uint64_t * result, uint64_t address, unsigned),
        (result, address))
FORWARD(cuMemHostAlloc, allocate_host, (uint64_t * result, size_t bytes, unsigned), (result, bytes))
FORWARD(cuMemFreeHost, free_host, (uint64_t address), (address))
FORWARD(cuMemAlloc_v2, allocate, (uint64_t * result, size_t bytes), (result, bytes))
FORWARD(cuMemFree_v2, free, (uint64_t address), (address))
FORWARD(cuMemcpyHtoDAsync_v2, copy_to_device, (uint64_t target, uint64_t source, size_t bytes, uint64_t stream),
        (target, source, bytes, stream))
FORWARD(cuMemcpyDtoHAsync_v2, copy_to_host, (uint64_t target, uint64_t source, size_t bytes, uint64_t stream),
        (target, source, bytes, stream))
FORWARD(cuMemcpyAsync, copy_any, (uint64_t target, uint64_t source, size_t bytes, uint64_t stream),
        (target, source, bytes, stream))
FORWARD(cuStreamCreate, create_stream, (uint64_t * result, unsigned), (result))
FORWARD(cuStreamDestroy_v2, destroy_stream, (uint64_t stream), (stream))
FORWARD(cuStreamSynchronize, synchronize_stream, (uint64_t stream), (stream))
FORWARD(cuStreamIsCapturing, is_capturing, (uint64_t stream, int* result), (stream, result))
FORWARD(cuStreamBatchMemOp_v2, memory_operations,
        (uint64_t stream, unsigned count, const fake_gpu::MemoryOperation* operations, unsigned),
        (stream, count, operations))
FORWARD(cuStreamBeginCapture_v2, begin_capture, (uint64_t stream, int), (stream))
FORWARD(cuStreamEndCapture, end_capture, (uint64_t stream, uint64_t* graph), (stream, graph))
int cuGraphInstantiateWithFlags(uint64_t* result, uint64_t graph, uint64_t) {
  *result = graph;
  return Gpu::instance().call(__func__);
}
FORWARD(cuGraphLaunch, launch, (uint64_t graph, uint64_t stream), (graph, stream))
FORWARD(cuGraphExecDestroy, destroy_graph, (uint64_t graph), (graph))
int cuGraphDestroy(uint64_t) {
  return Gpu::instance().call(__func__);
}
FORWARD(cuEventCreate, create_event, (uint64_t * result, unsigned), (result))
FORWARD(cuEventDestroy_v2, destroy_event, (uint64_t event), (event))
FORWARD(cuEventRecord, record_event, (uint64_t event, uint64_t stream), (event, stream))
FORWARD(cuEventQuery, query_event, (uint64_t event), (event))
FORWARD(cuEventSynchronize, synchronize_event, (uint64_t event), (event))

}  // extern "C"

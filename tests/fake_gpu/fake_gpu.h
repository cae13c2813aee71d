// A double of a GPU and its driver, for machines without one. It stands in for what the client cannot do without a
// device: in-order streams (a thread each) whose copies happen late, device memory with addresses that the host cannot
// use, registered ranges, events, stream memory operations, capture and replay of graphs, and errors on demand. Built
// by the tests into libcuda.so.1 and libamdhip64.so; it is no model of a GPU's speed.
//
// Addresses: device memory is host memory with bit 52 set; registered or pinned host memory has bit 53 set in its
// device address. Neither is a valid address of the process, so using one kind for another is an error, as on a real
// device.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fake_gpu {

// The numbers are the drivers' own; both use the same for these.
enum Code : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidContext = 201,
  kIllegalState = 401,
  kInvalidHandle = 400,
  kNotReady = 600,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
};

constexpr uint64_t kDeviceBit = uint64_t{1} << 52;
constexpr uint64_t kMappedBit = uint64_t{1} << 53;

struct MemoryOperation {
  uint32_t operation;
  uint64_t address;
  uint64_t value;
  uint32_t flags;
  uint64_t alias;
  uint64_t pad;
};
static_assert(sizeof(MemoryOperation) == 48);

using Work = std::function<void()>;

struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Work> queue;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  bool stopping = false;
  bool capturing = false;
  std::vector<Work> captured;
  std::thread thread;
};

struct Event {
  std::shared_ptr<Stream> stream;
  uint64_t target = 0;
};

struct Graph {
  std::vector<Work> work;
};

class Gpu {
 public:
  static Gpu& instance();

  // Counts a call; returns the error that was ordered for it, or 0.
  int call(const char* function);
  void fail(const std::string& function, int code, uint64_t after);
  // The piece of work of this name (the method that enqueues it) fails when it runs, in a replayed graph too, and the
  // context is lost: from then on all work is dropped and every call returns `code`, until forget_calls().
  void fail_in_stream(const std::string& work, int code, uint64_t after);
  uint64_t calls(const std::string& function);
  uint64_t counter(const std::string& name);
  void set_option(const std::string& name, int64_t value);
  int64_t option(const std::string& name);
  void forget_calls();

  int register_host(uint64_t address, uint64_t bytes, unsigned flags);
  int unregister_host(uint64_t address);
  int device_pointer(uint64_t* result, uint64_t address);
  int allocate_host(uint64_t* result, uint64_t bytes);
  int free_host(uint64_t address);
  int allocate(uint64_t* result, uint64_t bytes);
  int free(uint64_t address);

  int copy_to_device(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream);
  int copy_to_host(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream);
  int copy_any(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream);
  int memory_operations(uint64_t stream, unsigned count, const MemoryOperation* operations);

  int create_stream(uint64_t* result);
  int destroy_stream(uint64_t stream);
  int synchronize_stream(uint64_t stream);
  int is_capturing(uint64_t stream, int* result);
  int begin_capture(uint64_t stream);
  int end_capture(uint64_t stream, uint64_t* graph);
  int launch(uint64_t graph, uint64_t stream);
  int destroy_graph(uint64_t graph);

  int create_event(uint64_t* result);
  int destroy_event(uint64_t event);
  int record_event(uint64_t event, uint64_t stream);
  int query_event(uint64_t event);
  int synchronize_event(uint64_t event);

 private:
  struct HostRange {
    uint64_t bytes;
    bool read_only;
    bool pinned;  // allocated here
  };

  std::shared_ptr<Stream> stream_of(uint64_t handle);
  int enqueue(const char* name, uint64_t stream, Work body);
  int enqueue(uint64_t stream, Work work);
  void run_work(const std::string& name, const Work& work);
  // The error that was ordered for this use of the function, or 0. The lock is held.
  using Failures = std::map<std::string, std::pair<int, uint64_t>>;
  static int take_failure(Failures& failures, const std::string& function);
  // The host's address of a device address of `bytes` bytes, or 0.
  uint64_t resolve(uint64_t address, uint64_t bytes, bool for_writing);
  uint64_t resolve_device(uint64_t address, uint64_t bytes);
  const HostRange* host_range(uint64_t address, uint64_t bytes);
  void delay();

  std::mutex lock_;
  std::map<std::string, uint64_t> calls_;
  std::map<std::string, uint64_t> counters_;
  Failures failures_;
  Failures stream_failures_;
  std::atomic<int> lost_{0};  // the code of the error that has ended the context
  std::map<std::string, int64_t> options_;
  std::map<uint64_t, HostRange> host_ranges_;
  std::map<uint64_t, uint64_t> device_ranges_;
  std::map<uint64_t, std::shared_ptr<Stream>> streams_;
  std::map<uint64_t, std::unique_ptr<Event>> events_;
  std::map<uint64_t, std::unique_ptr<Graph>> graphs_;
  uint64_t next_handle_ = 0x1000;
  std::atomic<bool> zero_cost_{false};
  std::atomic<int64_t> delay_us_{0};
};

}  // namespace fake_gpu

// An entry point of a driver's library that hands on to the device. Whoever uses it says in enter() what a call needs.
#define FORWARD(name, method, parameters, arguments)   \
  int name parameters {                                \
    if (const int code = enter(__func__)) return code; \
    return Gpu::instance().method arguments;           \
  }

#include "fake_gpu.h"

#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake_gpu {
namespace {

// Whether every page of the range is mapped, and mapped for writing.
bool is_writable(uint64_t address, uint64_t bytes, bool* mapped) {
  FILE* maps = std::fopen("/proc/self/maps", "r");
  if (maps == nullptr) std::abort();
  char line[512];
  uint64_t covered = address;
  bool writable = true;
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    uint64_t begin, end;
    char rights[5];
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &begin, &end, rights) != 3) continue;
    if (begin > covered || end <= covered) continue;
    if (rights[0] != 'r') break;
    if (rights[1] != 'w') writable = false;
    covered = end;
    if (covered >= address + bytes) break;
  }
  std::fclose(maps);
  *mapped = covered >= address + bytes;
  return writable;
}

void run(const std::shared_ptr<Stream>& stream) {
  std::unique_lock guard(stream->lock);
  for (;;) {
    stream->changed.wait(guard, [&] { return !stream->queue.empty() || stream->stopping; });
    if (stream->queue.empty()) return;
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    guard.unlock();
    work();
    guard.lock();
    ++stream->done;
    stream->changed.notify_all();
  }
}

std::shared_ptr<Stream> make_stream() {
  auto stream = std::make_shared<Stream>();
  stream->thread = std::thread([stream] { run(stream); });
  stream->thread.detach();
  return stream;
}

}  // namespace

// Never destroyed: streams' threads may outlive static destructors.
Gpu& Gpu::instance() {
  static Gpu& gpu = *new Gpu;
  return gpu;
}

int Gpu::take_failure(Failures& failures, const std::string& function) {
  const auto failure = failures.find(function);
  if (failure == failures.end() || failure->second.second-- > 0) return 0;
  const int code = failure->second.first;
  failures.erase(failure);
  return code;
}

int Gpu::call(const char* function) {
  const std::lock_guard guard(lock_);
  ++calls_[function];
  if (const int lost = lost_) return lost;
  return failures_.empty() ? 0 : take_failure(failures_, function);
}

void Gpu::fail(const std::string& function, int code, uint64_t after) {
  const std::lock_guard guard(lock_);
  if (code == 0) {
    failures_.erase(function);
  } else {
    failures_[function] = {code, after};
  }
}

void Gpu::fail_in_stream(const std::string& work, int code, uint64_t after) {
  const std::lock_guard guard(lock_);
  stream_failures_[work] = {code, after};
}

// On a stream's thread.
void Gpu::run_work(const std::string& name, const Work& work) {
  if (lost_ != 0) return;
  {
    const std::lock_guard guard(lock_);
    if (const int code = take_failure(stream_failures_, name)) {
      lost_ = code;
      return;
    }
  }
  work();
}

uint64_t Gpu::calls(const std::string& function) {
  const std::lock_guard guard(lock_);
  return calls_[function];
}

void Gpu::forget_calls() {
  const std::lock_guard guard(lock_);
  calls_.clear();
  counters_.clear();
  failures_.clear();
  stream_failures_.clear();
  // The end of a context gives back what was registered in it.
  if (lost_.exchange(0) != 0) std::erase_if(host_ranges_, [](const auto& range) { return !range.second.pinned; });
}

uint64_t Gpu::counter(const std::string& name) {
  const std::lock_guard guard(lock_);
  if (name == "registered") {
    uint64_t count = 0;
    for (const auto& [address, range] : host_ranges_) count += range.pinned ? 0 : 1;
    return count;
  }
  if (name == "pinned") {
    uint64_t count = 0;
    for (const auto& [address, range] : host_ranges_) count += range.pinned ? 1 : 0;
    return count;
  }
  if (name == "events") return events_.size();
  return counters_[name];
}

// zero_cost: copies do nothing and events happen at once. delay_us: how late each copy is. no_read_only: as a device
// that cannot register read-only memory. no_memory: allocations fail.
void Gpu::set_option(const std::string& name, int64_t value) {
  const std::lock_guard guard(lock_);
  options_[name] = value;
  zero_cost_ = options_["zero_cost"] != 0;
  delay_us_ = options_["delay_us"];
}

int64_t Gpu::option(const std::string& name) {
  const std::lock_guard guard(lock_);
  return options_[name];
}

void Gpu::delay() {
  if (const int64_t us = delay_us_.load()) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

// ---- memory

int Gpu::register_host(uint64_t address, uint64_t bytes, unsigned flags) {
  if (bytes == 0 || address == 0) return kInvalidValue;
  const bool read_only = (flags & 8) != 0;
  if (read_only && option("no_read_only") != 0) return kNotSupported;
  bool mapped = false;
  const bool writable = is_writable(address, bytes, &mapped);
  if (!mapped || (!writable && !read_only)) return kInvalidValue;
  const std::lock_guard guard(lock_);
  for (const auto& [begin, range] : host_ranges_) {
    if (begin < address + bytes && address < begin + range.bytes) return kAlreadyRegistered;
  }
  host_ranges_[address] = {bytes, read_only, false};
  return kSuccess;
}

int Gpu::unregister_host(uint64_t address) {
  const std::lock_guard guard(lock_);
  const auto range = host_ranges_.find(address);
  if (range == host_ranges_.end() || range->second.pinned) return kNotRegistered;
  host_ranges_.erase(range);
  return kSuccess;
}

const Gpu::HostRange* Gpu::host_range(uint64_t address, uint64_t bytes) {
  auto range = host_ranges_.upper_bound(address);
  if (range == host_ranges_.begin()) return nullptr;
  --range;
  return address + bytes <= range->first + range->second.bytes ? &range->second : nullptr;
}

int Gpu::device_pointer(uint64_t* result, uint64_t address) {
  const std::lock_guard guard(lock_);
  if (host_range(address, 1) == nullptr) return kInvalidValue;
  *result = address | kMappedBit;
  return kSuccess;
}

int Gpu::allocate_host(uint64_t* result, uint64_t bytes) {
  if (option("no_memory") != 0) return kOutOfMemory;
  void* memory = bytes == 0 ? nullptr : std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == nullptr) return kInvalidValue;
  std::memset(memory, 0xA5, bytes);
  const std::lock_guard guard(lock_);
  *result = reinterpret_cast<uint64_t>(memory);
  host_ranges_[*result] = {bytes, false, true};
  return kSuccess;
}

int Gpu::free_host(uint64_t address) {
  const std::lock_guard guard(lock_);
  const auto range = host_ranges_.find(address);
  if (range == host_ranges_.end() || !range->second.pinned) return kInvalidValue;
  host_ranges_.erase(range);
  std::free(reinterpret_cast<void*>(address));
  return kSuccess;
}

int Gpu::allocate(uint64_t* result, uint64_t bytes) {
  if (option("no_memory") != 0) return kOutOfMemory;
  void* memory = bytes == 0 ? nullptr : std::malloc(bytes);
  if (memory == nullptr) return kInvalidValue;
  std::memset(memory, 0xA5, bytes);
  const std::lock_guard guard(lock_);
  *result = reinterpret_cast<uint64_t>(memory) | kDeviceBit;
  device_ranges_[*result] = bytes;
  return kSuccess;
}

int Gpu::free(uint64_t address) {
  const std::lock_guard guard(lock_);
  if (device_ranges_.erase(address) == 0) return kInvalidValue;
  std::free(reinterpret_cast<void*>(address & ~kDeviceBit));
  return kSuccess;
}

uint64_t Gpu::resolve_device(uint64_t address, uint64_t bytes) {
  auto range = device_ranges_.upper_bound(address);
  if (range == device_ranges_.begin()) return 0;
  --range;
  return address + bytes <= range->first + range->second ? address & ~kDeviceBit : 0;
}

uint64_t Gpu::resolve(uint64_t address, uint64_t bytes, bool for_writing) {
  if ((address & kMappedBit) == 0) return resolve_device(address, bytes);
  const HostRange* range = host_range(address & ~kMappedBit, bytes);
  return range == nullptr || (for_writing && range->read_only) ? 0 : address & ~kMappedBit;
}

// ---- work in streams

std::shared_ptr<Stream> Gpu::stream_of(uint64_t handle) {
  const std::lock_guard guard(lock_);
  if (handle == 0 && !streams_.contains(0)) streams_[0] = make_stream();
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second;
}

int Gpu::enqueue(const char* name, uint64_t handle, Work body) {
  Work work = [this, name, body = std::move(body)] { run_work(name, body); };
  return enqueue(handle, std::move(work));
}

int Gpu::enqueue(uint64_t handle, Work work) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard guard(stream->lock);
  if (stream->capturing) {
    stream->captured.push_back(std::move(work));
  } else {
    stream->queue.push_back(std::move(work));
    ++stream->enqueued;
    stream->changed.notify_all();
  }
  return kSuccess;
}

int Gpu::copy_to_device(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream) {
  uint64_t host_target;
  {
    const std::lock_guard guard(lock_);
    host_target = resolve_device(target, bytes);
    if (host_target == 0 || (source & (kDeviceBit | kMappedBit)) != 0) return kInvalidValue;
    // Legal on a real device, but the driver then copies it twice and the call blocks: the client never wants that.
    if (host_range(source, bytes) == nullptr) ++counters_["pageable_copies"];
    counters_["bytes_to_device"] += bytes;
  }
  if (zero_cost_) return kSuccess;
  return enqueue("copy_to_device", stream, [this, host_target, source, bytes] {
    delay();
    std::memcpy(reinterpret_cast<void*>(host_target), reinterpret_cast<const void*>(source), bytes);
  });
}

int Gpu::copy_to_host(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream) {
  uint64_t host_source;
  {
    const std::lock_guard guard(lock_);
    host_source = resolve_device(source, bytes);
    if (host_source == 0 || (target & (kDeviceBit | kMappedBit)) != 0) return kInvalidValue;
    const HostRange* range = host_range(target, bytes);
    if (range == nullptr) ++counters_["pageable_copies"];
    if (range != nullptr && range->read_only) return kInvalidValue;
  }
  return enqueue("copy_to_host", stream, [this, target, host_source, bytes] {
    delay();
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(host_source), bytes);
  });
}

int Gpu::copy_any(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream) {
  uint64_t host_target, host_source;
  {
    const std::lock_guard guard(lock_);
    host_target = resolve(target, bytes, true);
    host_source = resolve(source, bytes, false);
    if (host_target == 0 || host_source == 0) return kInvalidValue;
  }
  return enqueue("copy_any", stream, [this, host_target, host_source, bytes] {
    delay();
    std::memcpy(reinterpret_cast<void*>(host_target), reinterpret_cast<const void*>(host_source), bytes);
  });
}

int Gpu::memory_operations(uint64_t stream, unsigned count, const MemoryOperation* operations) {
  std::vector<MemoryOperation> batch(operations, operations + count);
  {
    const std::lock_guard guard(lock_);
    for (MemoryOperation& operation : batch) {
      if (operation.operation != 1 && operation.operation != 2) return kInvalidValue;
      operation.address = resolve(operation.address, 4, operation.operation == 2);
      if (operation.address == 0 || operation.address % 4 != 0) return kInvalidValue;
    }
  }
  return enqueue("memory_operations", stream, [batch] {
    for (const MemoryOperation& operation : batch) {
      std::atomic_ref word(*reinterpret_cast<uint32_t*>(operation.address));
      const auto value = static_cast<uint32_t>(operation.value);
      if (operation.operation == 2) {
        word.store(value);
      } else {
        // Cyclic >=. A wait without an end hangs the stream, as it would on a device: the client must prevent that.
        while (static_cast<int32_t>(word.load() - value) < 0) ::usleep(10);
      }
    }
  });
}

int Gpu::create_stream(uint64_t* result) {
  const std::lock_guard guard(lock_);
  *result = next_handle_ += 16;
  streams_[*result] = make_stream();
  return kSuccess;
}

int Gpu::destroy_stream(uint64_t handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr || handle == 0) return kInvalidHandle;
  {
    const std::lock_guard guard(stream->lock);
    stream->stopping = true;
    stream->changed.notify_all();
  }
  const std::lock_guard guard(lock_);
  streams_.erase(handle);
  return kSuccess;
}

int Gpu::synchronize_stream(uint64_t handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  std::unique_lock guard(stream->lock);
  if (stream->capturing) return kCaptureUnsupported;
  const uint64_t target = stream->enqueued;
  stream->changed.wait(guard, [&] { return stream->done >= target; });
  return lost_;
}

int Gpu::is_capturing(uint64_t handle, int* result) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard guard(stream->lock);
  *result = stream->capturing ? 1 : 0;
  return kSuccess;
}

int Gpu::begin_capture(uint64_t handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr || handle == 0) return kInvalidHandle;
  const std::lock_guard guard(stream->lock);
  if (stream->capturing) return kIllegalState;
  stream->capturing = true;
  stream->captured.clear();
  return kSuccess;
}

int Gpu::end_capture(uint64_t handle, uint64_t* graph) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  auto made = std::make_unique<Graph>();
  {
    const std::lock_guard guard(stream->lock);
    if (!stream->capturing) return kIllegalState;
    stream->capturing = false;
    made->work = std::move(stream->captured);
  }
  const std::lock_guard guard(lock_);
  *graph = next_handle_ += 16;
  graphs_[*graph] = std::move(made);
  return kSuccess;
}

int Gpu::launch(uint64_t graph, uint64_t stream) {
  std::vector<Work> work;
  {
    const std::lock_guard guard(lock_);
    const auto found = graphs_.find(graph);
    if (found == graphs_.end()) return kInvalidHandle;
    work = found->second->work;
  }
  for (Work& one : work) {
    if (const int code = enqueue(stream, std::move(one))) return code;
  }
  return kSuccess;
}

int Gpu::destroy_graph(uint64_t graph) {
  const std::lock_guard guard(lock_);
  return graphs_.erase(graph) == 1 ? kSuccess : kInvalidHandle;
}

// ---- events

int Gpu::create_event(uint64_t* result) {
  const std::lock_guard guard(lock_);
  *result = next_handle_ += 16;
  events_[*result] = std::make_unique<Event>();
  return kSuccess;
}

int Gpu::destroy_event(uint64_t event) {
  const std::lock_guard guard(lock_);
  return events_.erase(event) == 1 ? kSuccess : kInvalidHandle;
}

int Gpu::record_event(uint64_t handle, uint64_t stream_handle) {
  const auto stream = stream_of(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  uint64_t target;
  {
    const std::lock_guard guard(stream->lock);
    target = stream->enqueued;
  }
  const std::lock_guard guard(lock_);
  const auto event = events_.find(handle);
  if (event == events_.end()) return kInvalidHandle;
  event->second->stream = stream;
  event->second->target = target;
  return kSuccess;
}

int Gpu::query_event(uint64_t handle) {
  const std::lock_guard guard(lock_);
  const auto event = events_.find(handle);
  if (event == events_.end()) return kInvalidHandle;
  if (event->second->stream == nullptr) return kSuccess;
  const std::lock_guard stream_guard(event->second->stream->lock);
  return event->second->stream->done >= event->second->target ? kSuccess : kNotReady;
}

int Gpu::synchronize_event(uint64_t handle) {
  std::shared_ptr<Stream> stream;
  uint64_t target;
  {
    const std::lock_guard guard(lock_);
    const auto event = events_.find(handle);
    if (event == events_.end()) return kInvalidHandle;
    stream = event->second->stream;
    target = event->second->target;
  }
  if (stream == nullptr) return kSuccess;
  std::unique_lock guard(stream->lock);
  stream->changed.wait(guard, [&] { return stream->done >= target; });
  return lost_;
}

}  // namespace fake_gpu

extern "C" {

// What the tests use to steer the double.
void fake_gpu_fail(const char* function, int code, uint64_t after) {
  fake_gpu::Gpu::instance().fail(function, code, after);
}
void fake_gpu_fail_in_stream(const char* work, int code, uint64_t after) {
  fake_gpu::Gpu::instance().fail_in_stream(work, code, after);
}
uint64_t fake_gpu_calls(const char* function) {
  return fake_gpu::Gpu::instance().calls(function);
}
uint64_t fake_gpu_counter(const char* name) {
  return fake_gpu::Gpu::instance().counter(name);
}
void fake_gpu_set_option(const char* name, int64_t value) {
  fake_gpu::Gpu::instance().set_option(name, value);
}
void fake_gpu_forget_calls(void) {
  fake_gpu::Gpu::instance().forget_calls();
}

}  // extern "C"

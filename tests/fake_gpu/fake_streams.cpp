// The double's streams, a thread each, and what is put into them: copies, memory operations, graphs, events.
#include <unistd.h>

#include <cstring>

#include "fake_gpu.h"

namespace fake_gpu {
namespace {

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

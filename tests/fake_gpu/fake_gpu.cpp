// The double's switches, counters and errors on demand; fake_memory.cpp has its memory, fake_streams.cpp its work.
#include "fake_gpu.h"

#include <unistd.h>

namespace fake_gpu {

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

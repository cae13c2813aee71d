// The state page: one page of shared memory that the daemon alone can write and every client maps read-only. It says
// which workers sleep and, through a robust futex, whether the daemon lives (docs/protocol.md).
//
// The futex is held by the keeper thread, which does nothing else that could touch another robust list. The thread's
// last work is to free the memory of sessions that have ended, so that no worker pays for large unmappings.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/mapping.h"
#include "common/unique_fd.h"
#include "engram/wire.h"

namespace engram {

class RingSession;

class StatePage {
 public:
  static std::unique_ptr<StatePage> create(std::string& error);
  ~StatePage();

  int descriptor() const { return descriptor_.get(); }
  std::uint64_t bytes() const { return state_.bytes(); }

  void set_phase(std::uint32_t phase) { std::atomic_ref(page()->phase).store(phase, std::memory_order_seq_cst); }
  // Sequentially consistent: pairs with the client's look at the flag after it has moved its tail.
  void set_asleep(std::uint32_t worker, bool asleep) {
    std::atomic_ref(page()->worker_asleep[worker]).store(asleep ? 1 : 0, std::memory_order_seq_cst);
  }

  // Runs something slow (freeing large memory) in the keeper thread. Any thread.
  void bury(std::function<void()> work);
  void bury(std::unique_ptr<RingSession> session);

 private:
  StatePage() = default;
  engram_state* page() const { return reinterpret_cast<engram_state*>(state_.data()); }
  void keep();

  UniqueFd descriptor_;
  Mapping state_;
  Mapping robust_list_;  // shared anonymous memory: the OOM reaper spares it
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> buried_;  // under mutex_
  bool held_ = false;                          // under mutex_: the futex is held
  bool stopping_ = false;                      // under mutex_
  std::thread keeper_;
};

}  // namespace engram

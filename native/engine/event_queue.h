// What the engine tells the daemon's event loop: a short queue and an eventfd. A full queue drops reports of bad pages
// (they are counted too); the other kinds are bounded by the number of sessions and layers.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <deque>
#include <mutex>

#include "common/unique_fd.h"
#include "engram/engine.h"

namespace engram {

class EventQueue {
 public:
  EventQueue() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  int descriptor() const { return descriptor_.get(); }

  void push(const engram_event& event) {
    {
      const std::lock_guard lock(mutex_);
      if (events_.size() >= kCapacity && event.kind == ENGRAM_EVENT_PAGE) return;
      events_.push_back(event);
    }
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(descriptor_.get(), &one, sizeof one);
  }

  bool pop(engram_event* event) {
    const std::lock_guard lock(mutex_);
    if (events_.empty()) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t bytes = read(descriptor_.get(), &count, sizeof count);
      return false;
    }
    *event = events_.front();
    events_.pop_front();
    return true;
  }

 private:
  static constexpr std::size_t kCapacity = 1024;
  UniqueFd descriptor_;
  std::mutex mutex_;
  std::deque<engram_event> events_;
};

}  // namespace engram

// A queue from any thread to the daemon's event loop, with an eventfd that turns readable when there is something in
// it. The loop reads the eventfd's count first and then takes items until there are none: what is pushed meanwhile
// makes it readable again.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <utility>

#include "common/unique_fd.h"

namespace engram {

template <typename Item>
class SignalledQueue {
 public:
  static constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

  SignalledQueue() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  // -1 where the kernel gave none.
  int descriptor() const { return descriptor_.get(); }

  // Drops the item where the queue has reached the limit.
  void push(Item item, std::size_t limit = kNoLimit) {
    {
      const std::lock_guard lock(mutex_);
      if (items_.size() >= limit) return;
      items_.push_back(std::move(item));
    }
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(descriptor_.get(), &one, sizeof one);
  }

  // False where the queue is empty.
  bool pop(Item* item) {
    const std::lock_guard lock(mutex_);
    if (items_.empty()) return false;
    *item = std::move(items_.front());
    items_.pop_front();
    return true;
  }

 private:
  UniqueFd descriptor_;
  std::mutex mutex_;
  std::deque<Item> items_;
};

}  // namespace engram

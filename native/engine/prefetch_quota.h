// How many rows wait to be prefetched in one worker: bounded in all, and for each session, so that one client that asks
// for far more than the drive gives does not push out what others ask for. What exceeds a bound is dropped: a prefetch
// is best effort.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace engram {

class PrefetchQuota {
 public:
  static constexpr std::uint64_t kAllRows = 1u << 20;

  // Worker's thread. False, with nothing taken, where a bound is reached. Owner 0 is the daemon's own; it keeps to the
  // bound of all alone.
  bool take(std::uint64_t owner, std::uint64_t rows, std::uint64_t owner_limit) {
    if (queued() + rows > kAllRows) return false;
    if (owner != 0) {
      const auto place = find(owner);
      const std::uint64_t held = place == owners_.end() ? 0 : place->rows;
      if (held + rows > owner_limit) return false;
      if (place == owners_.end()) {
        owners_.push_back({owner, rows});
      } else {
        place->rows += rows;
      }
    }
    all_rows_.store(queued() + rows, std::memory_order_relaxed);
    return true;
  }

  // Worker's thread. What `take` gave.
  void give_back(std::uint64_t owner, std::uint64_t rows) {
    all_rows_.store(queued() - std::min(queued(), rows), std::memory_order_relaxed);
    const auto place = find(owner);
    if (place == owners_.end()) return;
    place->rows -= std::min(place->rows, rows);
    if (place->rows == 0) {
      *place = owners_.back();
      owners_.pop_back();
    }
  }

  // Any thread.
  std::uint64_t queued() const { return all_rows_.load(std::memory_order_relaxed); }

 private:
  struct Owner {
    std::uint64_t id;
    std::uint64_t rows;  // not 0
  };
  std::vector<Owner>::iterator find(std::uint64_t owner) {
    return std::find_if(owners_.begin(), owners_.end(), [owner](const Owner& one) { return one.id == owner; });
  }

  std::atomic<std::uint64_t> all_rows_{0};
  std::vector<Owner> owners_;  // sessions with prefetches under way: few
};

}  // namespace engram

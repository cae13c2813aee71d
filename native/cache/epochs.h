// Epoch-based reclamation. A reader announces the epoch in which it began; what was retired may be reused once every
// active reader has begun in a later epoch. Readers take no lock and write one word of their own.
//
// Why it is safe: a reader stores its announcement before it loads any slot number, a writer removes a slot number
// before it loads the announcements, all four sequentially consistent. So either the writer sees the reader, or the
// reader no longer finds the slot.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace engram {

class Epochs {
 public:
  explicit Epochs(std::uint32_t readers) : readers_(readers), announced_(new Announcement[readers]) {}

  // Begins a read section of `reader`; at most one at a time per reader, by one thread.
  void enter(std::uint32_t reader) {
    announced_[reader].epoch.store(current_.load(std::memory_order_seq_cst), std::memory_order_seq_cst);
  }
  void leave(std::uint32_t reader) { announced_[reader].epoch.store(kIdle, std::memory_order_release); }

  // The stamp of what was removed before this call. One writer at a time.
  std::uint64_t retire() { return current_.fetch_add(1, std::memory_order_seq_cst); }

  // Things with a stamp below the result are out of every reader's reach.
  std::uint64_t safe_below() const {
    std::uint64_t oldest = current_.load(std::memory_order_seq_cst);
    for (std::uint32_t reader = 0; reader < readers_; ++reader) {
      const std::uint64_t epoch = announced_[reader].epoch.load(std::memory_order_seq_cst);
      if (epoch != kIdle && epoch < oldest) oldest = epoch;
    }
    return oldest;
  }

 private:
  static constexpr std::uint64_t kIdle = 0;
  struct alignas(64) Announcement {
    std::atomic<std::uint64_t> epoch{kIdle};
  };

  alignas(64) std::atomic<std::uint64_t> current_{1};
  std::uint32_t readers_;
  std::unique_ptr<Announcement[]> announced_;
};

}  // namespace engram

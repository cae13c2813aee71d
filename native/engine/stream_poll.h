// StreamPoll: how long a worker may sleep between two looks at the doorbells of GPU streams, which cannot wake it.
//
// The budget is a share of one CPU. The time from the end of one sleep to the beginning of the next is what a look
// costs, and the sleep is as long as makes that the budget's share, within kShortestNs .. kLongestNs. After kQuietNs
// without a doorbell the sleeps grow, up to kQuietSleepNs: an idle engine costs next to nothing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ring/futex.h"

namespace engram {

class StreamPoll {
 public:
  explicit StreamPoll(std::uint32_t budget_permille) : budget_(std::clamp(budget_permille, 1u, 1000u)) {}

  // A doorbell rang.
  void rang() { last_ring_ns_ = monotonic_ns(); }

  // How long to sleep now; 0 = look again at once (a budget of a whole CPU).
  std::int64_t begin_sleep() {
    const std::int64_t now = monotonic_ns();
    const std::int64_t look_ns = woke_ns_ == 0 ? kTypicalLookNs : std::clamp(now - woke_ns_, kMinLookNs, kMaxLookNs);
    // Smoothed, as a look that was interrupted says nothing about the next.
    average_look_ns_ += (look_ns - average_look_ns_) / 8;
    if (budget_ == 1000) return 0;
    const std::int64_t sleep_ns = std::clamp(average_look_ns_ * (1000 - budget_) / budget_, kShortestNs, kLongestNs);
    const std::int64_t quiet_ns = now - last_ring_ns_ - kQuietNs;
    if (quiet_ns <= 0) return sleep_ns;
    return std::min(std::max(sleep_ns, quiet_ns / kQuietShare), kQuietSleepNs);
  }
  void end_sleep() { woke_ns_ = monotonic_ns(); }

 private:
  static constexpr std::int64_t kMinLookNs = 4'000;  // the switches into and out of the kernel included
  static constexpr std::int64_t kTypicalLookNs = 5'000;
  static constexpr std::int64_t kMaxLookNs = 50'000;
  static constexpr std::int64_t kShortestNs = 2'000;
  static constexpr std::int64_t kLongestNs = 1'000'000;
  static constexpr std::int64_t kQuietNs = 1'000'000'000;
  static constexpr std::int64_t kQuietShare = 1000;
  static constexpr std::int64_t kQuietSleepNs = 2'000'000;

  std::int64_t budget_;
  std::int64_t last_ring_ns_ = 0;
  std::int64_t woke_ns_ = 0;
  std::int64_t average_look_ns_ = kTypicalLookNs;
};

}  // namespace engram

// Counters of the engine. Each worker writes its own set, so counting is an ordinary store; readers add the sets up.
// Requests' latencies go into log-linear histograms: sixteen steps per power of two, so a percentile is right to 6 %.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "engram/engine.h"

namespace engram {

// A counter with one writer.
class Counter {
 public:
  void add(std::uint64_t amount) {
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  std::uint64_t read() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

struct alignas(64) LayerCounters {
  Counter requests;
  Counter rows_zero;
  Counter dram_hits;
  Counter dram_misses;
  Counter rows_failed;
  Counter rows_unique;
  Counter nvme_reads;
  Counter prefetch_reads;
  Counter rereads;
  std::array<Counter, ENGRAM_STATUS_COUNT> errors;
};

class LatencyHistogram {
 public:
  static constexpr std::uint32_t kSteps = 16;
  static constexpr std::uint32_t kBuckets = 64 * kSteps;

  void add(std::uint64_t nanoseconds) {
    buckets_[bucket(nanoseconds)].add(1);
    sum_.add(nanoseconds);
  }
  std::uint64_t read(std::uint32_t bucket) const { return buckets_[bucket].read(); }
  std::uint64_t sum() const { return sum_.read(); }

  static std::uint32_t bucket(std::uint64_t value) {
    if (value < kSteps) return static_cast<std::uint32_t>(value);
    const auto power = static_cast<std::uint32_t>(std::bit_width(value)) - 1;  // >= 4
    return (power - 3) * kSteps + static_cast<std::uint32_t>((value >> (power - 4)) & (kSteps - 1));
  }
  // The first value above a bucket's range, in nanoseconds.
  static std::uint64_t end(std::uint32_t bucket) {
    if (bucket < kSteps) return bucket + 1;
    const std::uint32_t power = bucket / kSteps + 3;
    if (power >= 63 && bucket % kSteps == kSteps - 1) return ~std::uint64_t{0};
    return (std::uint64_t{1} << (power - 4)) * (kSteps + bucket % kSteps + 1);
  }
  // The middle of a bucket's range, in nanoseconds.
  static double middle(std::uint32_t bucket) {
    if (bucket < kSteps) return bucket;
    const std::uint32_t power = bucket / kSteps + 3;
    const double step = static_cast<double>(std::uint64_t{1} << (power - 4));
    return step * (kSteps + bucket % kSteps) + step / 2;
  }

 private:
  std::array<Counter, kBuckets> buckets_;
  Counter sum_;
};

inline std::uint32_t latency_class(std::uint64_t rows) {
  if (rows <= 256) return 0;
  if (rows <= 4096) return 1;
  return rows <= 65536 ? 2 : 3;
}

}  // namespace engram

// Latency histograms of all workers added up, for metrics and for percentiles of an interval.
#include "engine/engine.h"

namespace engram {

std::uint64_t Engine::latency_count(std::uint32_t latency_class, std::uint32_t bucket) const {
  std::uint64_t count = at_once_->latency(latency_class).read(bucket);
  for (const auto& worker : workers_) count += worker->latency(latency_class).read(bucket);
  return count;
}

std::uint64_t Engine::latency_histogram(std::uint32_t latency_class, engram_latency_bucket* buckets,
                                        std::uint64_t capacity, std::uint64_t* sum_ns) const {
  *sum_ns = 0;
  if (latency_class >= ENGRAM_LATENCY_CLASSES) return 0;
  // A request that completes meanwhile may be in one of the two alone.
  std::uint64_t filled = 0;
  for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
    const std::uint64_t count = latency_count(latency_class, bucket);
    if (count == 0) continue;
    if (filled < capacity) buckets[filled] = {LatencyHistogram::end(bucket), count};
    ++filled;
  }
  *sum_ns = at_once_->latency(latency_class).sum();
  for (const auto& worker : workers_) *sum_ns += worker->latency(latency_class).sum();
  return filled;
}

}  // namespace engram

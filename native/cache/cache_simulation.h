// The row cache's own policy on keys alone. One thread at a time.
#pragma once

#include <cstdint>

#include "cache/row_cache.h"

namespace engram {

class CacheSimulation {
 public:
  explicit CacheSimulation(std::uint64_t rows) : cache_(options_of(rows)) {}

  bool valid() const { return cache_.valid(); }
  std::uint64_t capacity() const { return cache_.capacity(); }

  // One look-up, with admission after a miss. Whether it hit.
  bool look_up(std::uint64_t key) {
    std::uint32_t candidate = 0;
    cache_.enter(0);
    cache_.find_block(&key, 1, &candidate);
    const bool hit = candidate != 0 && cache_.row(candidate, key) != nullptr;
    cache_.leave(0);
    if (!hit) cache_.admit(key, nullptr);
    return hit;
  }

 private:
  static RowCache::Options options_of(std::uint64_t rows) {
    RowCache::Options options;
    options.simulated_rows = rows;
    return options;
  }

  RowCache cache_;
};

}  // namespace engram

// The row cache as a simulator of itself; see simulate.h.
#include "engram/simulate.h"

#include <algorithm>
#include <memory>
#include <new>

#include "cache/row_cache.h"

using engram::RowCache;

struct engram_simulation {
  explicit engram_simulation(const RowCache::Options& options) : cache(options) {}
  RowCache cache;
};

namespace {

constexpr std::uint64_t kPrefetchDistance = 24;  // index lines ahead

}  // namespace

engram_simulation* engram_simulation_create(uint64_t capacity_rows) {
  if (capacity_rows == 0) return nullptr;
  RowCache::Options options;
  options.simulated_rows = capacity_rows;
  try {
    auto simulation = std::make_unique<engram_simulation>(options);
    return simulation->cache.valid() ? simulation.release() : nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

uint64_t engram_simulation_run(engram_simulation* simulation, const int64_t* keys, uint64_t count) {
  return engram_simulation_trace(simulation, keys, count, nullptr);
}

uint64_t engram_simulation_trace(engram_simulation* simulation, const int64_t* keys, uint64_t count, uint8_t* missed) {
  RowCache& cache = simulation->cache;
  uint64_t hits = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (i + kPrefetchDistance < count) cache.prefetch_index(static_cast<std::uint64_t>(keys[i + kPrefetchDistance]));
    if (missed != nullptr) missed[i] = 0;
    if (keys[i] < 0) continue;
    const auto key = static_cast<std::uint64_t>(keys[i]);
    std::uint32_t candidate = 0;
    cache.enter(0);
    cache.find_block(&key, 1, &candidate);
    const bool hit = candidate != 0 && cache.row(candidate, key) != nullptr;
    cache.leave(0);
    if (hit) {
      ++hits;
    } else {
      if (missed != nullptr) missed[i] = 1;
      cache.admit(key, nullptr);
    }
  }
  return hits;
}

void engram_simulation_destroy(engram_simulation* simulation) {
  delete simulation;
}

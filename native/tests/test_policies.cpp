// The textbook policies that the benchmarks hold the row cache against, on sequences whose answer is known.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "engram/bench.h"

namespace {

using Keys = std::vector<std::uint32_t>;
using Policy = int (*)(const std::uint32_t*, std::uint64_t, std::uint32_t, std::uint64_t, std::uint64_t*);

std::uint64_t hits_of(Policy policy, const Keys& keys, std::uint64_t capacity) {
  std::uint64_t hits[2];
  REQUIRE(policy(keys.data(), keys.size(), *std::max_element(keys.begin(), keys.end()) + 1, capacity, hits) == 0);
  return hits[0];
}

// The most hits that any sequence of evictions gives, by trying all of them.
std::uint64_t best_hits(const Keys& keys, std::size_t at, std::vector<std::uint32_t> cached, std::size_t capacity) {
  if (at == keys.size()) return 0;
  if (std::find(cached.begin(), cached.end(), keys[at]) != cached.end()) {
    return 1 + best_hits(keys, at + 1, cached, capacity);
  }
  std::uint64_t best = best_hits(keys, at + 1, cached, capacity);  // not admitted
  if (cached.size() < capacity) {
    cached.push_back(keys[at]);
    return std::max(best, best_hits(keys, at + 1, cached, capacity));
  }
  for (std::uint32_t& victim : cached) {
    const std::uint32_t kept = std::exchange(victim, keys[at]);
    best = std::max(best, best_hits(keys, at + 1, cached, capacity));
    victim = kept;
  }
  return best;
}

}  // namespace

TEST_CASE("LRU keeps the last ones used") {
  CHECK(hits_of(engram_bench_lru, {0, 1, 0, 2, 1, 0}, 2) == 1);
  CHECK(hits_of(engram_bench_lru, {0, 1, 0, 2, 0, 1}, 2) == 2);
  CHECK(hits_of(engram_bench_lru, {0, 1, 2, 0, 1, 2}, 3) == 3);
}

TEST_CASE("Belady's hits are the most that are possible") {
  std::mt19937 random(4);
  for (int round = 0; round < 60; ++round) {
    Keys keys(10);
    for (std::uint32_t& key : keys) key = random() % 5;
    const std::size_t capacity = 1 + random() % 3;
    CAPTURE(round);
    CHECK(hits_of(engram_bench_belady, keys, capacity) == best_hits(keys, 0, {}, capacity));
  }
}

TEST_CASE("S3-FIFO keeps what returns through a scan, and nothing beats Belady") {
  Keys keys;
  std::mt19937 random(5);
  for (std::uint32_t i = 0; i < 40'000; ++i) keys.push_back(i % 2 == 0 ? random() % 80 : 1000 + i);
  const std::uint64_t lru = hits_of(engram_bench_lru, keys, 100);
  const std::uint64_t s3fifo = hits_of(engram_bench_s3fifo, keys, 100);
  CHECK(s3fifo > lru);
  CHECK(s3fifo > 15'000);
  CHECK(hits_of(engram_bench_belady, keys, 100) >= s3fifo);
}

TEST_CASE("past frequency is counted in the first half and serves the second") {
  const Keys keys = {3, 3, 1, 2, 3, 1, 3, 2};
  std::uint64_t hits[2];
  REQUIRE(engram_bench_past_frequency(keys.data(), keys.size(), 4, 1, hits) == 0);
  CHECK(hits[1] == 2);
  CHECK(engram_bench_past_frequency(keys.data(), keys.size(), 3, 1, hits) == -1);
  CHECK(engram_bench_lru(keys.data(), keys.size(), 4, 0, hits) == -1);
}

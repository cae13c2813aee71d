// The row cache under churn: readers copy rows without a lock while writers evict and reuse their slots. Each row's
// bytes follow from its key, so a reader that gets a reused slot sees it. Made for TSAN, where a missing epoch check is
// a data race as well.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cache/row_cache.h"

using engram::RowCache;

namespace {

constexpr std::uint32_t kRowBytes = 264;
constexpr std::uint64_t kRows = 4000;

void make_row(std::uint64_t row, std::uint8_t* bytes) {
  for (std::uint32_t offset = 0; offset < kRowBytes; offset += 8) {
    const std::uint64_t word = (row + 1) * 0x9E3779B97F4A7C15ull + offset;
    std::memcpy(bytes + offset, &word, 8);
  }
}

std::uint64_t rounds() {
  const char* text = std::getenv("ENGRAM_STRESS_ROUNDS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 1500;
}

}  // namespace

TEST_CASE("readers never see a reused slot") {
  RowCache::Options options;
  options.row_bytes = kRowBytes;
  options.budget_bytes = 300 * kRowBytes;  // far less than is asked for
  options.readers = 3;
  RowCache cache(options);
  REQUIRE(cache.valid());
  REQUIRE(cache.capacity() > 100);
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> hits{0};

  // As a worker does: look a block up inside an epoch, copy the hits, leave, admit the misses.
  const auto work = [&](std::uint32_t reader) {
    std::mt19937_64 random(reader + 1);
    std::uint64_t keys[RowCache::kBlockRows];
    std::uint32_t candidates[RowCache::kBlockRows];
    std::uint8_t copied[kRowBytes];
    std::uint8_t expected[kRowBytes];
    for (std::uint64_t round = 0; round < rounds(); ++round) {
      const std::uint32_t count = 1 + static_cast<std::uint32_t>(random() % 64);
      // Skewed, so that there are hits, promotions and ghosts.
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint64_t row = random() % 2 != 0 ? random() % 100 : random() % kRows;
        keys[i] = engram::row_key(1, row);
      }
      std::vector<std::uint64_t> missed;
      cache.enter(reader);
      cache.find_block(keys, count, candidates);
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint8_t* row = candidates[i] != 0 ? cache.row(candidates[i], keys[i]) : nullptr;
        if (row == nullptr) {
          missed.push_back(keys[i]);
          continue;
        }
        if (i % 16 == 0) std::this_thread::yield();  // let writers in between look-up and copy
        std::memcpy(copied, row, kRowBytes);
        make_row(engram::row_of_key(keys[i]), expected);
        if (std::memcmp(copied, expected, kRowBytes) != 0) wrong.fetch_add(1);
        hits.fetch_add(1, std::memory_order_relaxed);
      }
      cache.leave(reader);
      for (const std::uint64_t key : missed) {
        make_row(engram::row_of_key(key), expected);
        cache.admit(key, expected);
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t reader = 0; reader < options.readers; ++reader) threads.emplace_back(work, reader);
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong.load() == 0);
  CHECK(hits.load() > 1000);
  CHECK(cache.usage().rows <= cache.capacity());
}

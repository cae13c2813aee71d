// Sampling by hash, and Belady's limit against a plain implementation.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "cache/belady.h"
#include "cache/row_cache.h"
#include "cache/row_sample.h"
#include "cache/sample_filter.h"
#include "engram/sampling.h"

TEST_CASE("the filter finds exactly the rows whose hash is low enough") {
  std::mt19937_64 random(3);
  std::vector<std::uint16_t> positions(4096);
  for (const std::uint32_t count : {0u, 1u, 7u, 8u, 9u, 63u, 64u, 1000u, 4096u}) {
    for (const std::uint32_t limit : {0u, 1u << 20, 1u << 28, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu}) {
      std::vector<std::int64_t> ids(count);
      for (auto& id : ids) {
        id = static_cast<std::int64_t>(random() >> (24 + random() % 36));
        if (random() % 5 == 0) id = -1;
      }
      const std::uint32_t salt = engram::sample_salt(static_cast<std::uint32_t>(random() % 1000));
      std::vector<std::uint16_t> expected;
      for (std::uint32_t i = 0; i < count; ++i) {
        if (ids[i] >= 0 && engram::sample_hash(salt, static_cast<std::uint64_t>(ids[i])) <= limit) {
          expected.push_back(static_cast<std::uint16_t>(i));
        }
      }
      const std::uint32_t found = engram::filter_sample(ids.data(), count, salt, limit, positions.data());
      CHECK(std::vector<std::uint16_t>(positions.begin(), positions.begin() + found) == expected);
    }
  }
}

TEST_CASE("a sample holds its share of the rows, whatever their ids look like") {
  for (const std::uint64_t stride : {1ull, 15ull, 4096ull, 1'000'003ull}) {
    std::uint64_t found = 0;
    constexpr std::uint64_t kRows = 1 << 20;
    for (std::uint64_t row = 0; row < kRows; ++row) {
      found += engram::sample_hash_of_key(engram::row_key(3, row * stride)) < (1u << 26) ? 1 : 0;
    }
    const double share = static_cast<double>(found) / kRows * 64;
    CAPTURE(stride);
    CHECK(share == doctest::Approx(1.0).epsilon(0.05));
  }
}

TEST_CASE("thinning keeps what a lower threshold would have picked, in order") {
  std::vector<std::int32_t> ids(30'000);
  std::mt19937 random(5);
  for (auto& id : ids) id = static_cast<std::int32_t>(random() % 100'000) - 1;
  const auto sample = [&](std::uint64_t threshold) {
    std::vector<std::uint64_t> keys(ids.size());
    std::vector<std::uint8_t> columns(ids.size());
    keys.resize(
        engram_sample_rows(ids.data(), ids.size(), 6, 3, 1, threshold, keys.data(), columns.data(), keys.size()));
    return keys;
  };
  std::vector<std::uint64_t> keys = sample(std::uint64_t{1} << 30);
  CHECK(keys.size() > 1000);
  keys.resize(engram_thin_samples(keys.data(), keys.size(), std::uint64_t{1} << 27));
  CHECK(keys == sample(std::uint64_t{1} << 27));
  CHECK(sample(ENGRAM_SAMPLE_ALL).size() ==
        static_cast<std::size_t>(std::count_if(ids.begin(), ids.end(), [](std::int32_t id) { return id >= 0; })));
}

TEST_CASE("Belady's limit is that of a plain implementation") {
  std::mt19937_64 random(7);
  for (const std::uint64_t rows : {1ull, 2ull, 10ull, 100ull, 1000ull}) {
    std::vector<std::uint64_t> keys(3000);
    for (auto& key : keys)
      key = static_cast<std::uint64_t>(400.0 * std::pow(std::uniform_real_distribution()(random), 3));
    std::vector<std::uint32_t> next(keys.size());
    std::vector<std::uint8_t> missed(keys.size());
    engram::find_next_uses(keys.data(), keys.size(), next.data());
    const auto misses = engram::run_belady(next.data(), keys.size(), rows, missed.data());
    // The row to leave, the new one included, is the one whose next use is farthest.
    std::uint64_t expected = 0;
    std::set<std::uint64_t> cached;
    const auto next_use = [&](std::uint64_t key, std::size_t after) {
      return std::find(keys.begin() + static_cast<std::ptrdiff_t>(after) + 1, keys.end(), key) - keys.begin();
    };
    for (std::size_t i = 0; i < keys.size(); ++i) {
      expected += cached.insert(keys[i]).second ? 1 : 0;
      if (cached.size() <= rows) continue;
      cached.erase(std::max_element(cached.begin(), cached.end(),
                                    [&](std::uint64_t a, std::uint64_t b) { return next_use(a, i) < next_use(b, i); }));
    }
    CAPTURE(rows);
    CHECK(misses == expected);
    CHECK(static_cast<std::uint64_t>(std::count(missed.begin(), missed.end(), 1)) == misses);
  }
}

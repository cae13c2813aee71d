// The row cache alone: budget, policy, exactness of keys.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <unordered_set>
#include <vector>

#include "cache/row_cache.h"
#include "engram/simulate.h"

using engram::RowCache;

namespace {

RowCache::Options options_of(std::uint64_t budget_bytes, std::uint32_t row_bytes = 264) {
  RowCache::Options options;
  options.budget_bytes = budget_bytes;
  options.row_bytes = row_bytes;
  return options;
}

const std::uint8_t* find(RowCache& cache, std::uint64_t key) {
  std::uint32_t candidate = 0;
  cache.enter(0);
  cache.find_block(&key, 1, &candidate);
  const std::uint8_t* row = candidate != 0 ? cache.row(candidate, key) : nullptr;
  cache.leave(0);
  return row;
}

std::vector<std::uint8_t> row_of(std::uint64_t key, std::uint32_t row_bytes = 264) {
  std::vector<std::uint8_t> row(row_bytes);
  for (std::uint32_t i = 0; i < row_bytes; ++i) row[i] = static_cast<std::uint8_t>(key * 31 + i);
  return row;
}

}  // namespace

TEST_CASE("what was admitted is found until it is evicted") {
  RowCache cache(options_of(1 << 20));
  for (std::uint64_t row = 0; row < 1000; ++row) cache.admit(engram::row_key(1, row), row_of(row).data());
  for (std::uint64_t row = 0; row < 1000; ++row) {
    const std::uint8_t* found = find(cache, engram::row_key(1, row));
    REQUIRE(found != nullptr);
    CHECK(std::memcmp(found, row_of(row).data(), 264) == 0);
  }
  CHECK(find(cache, engram::row_key(1, 1000)) == nullptr);
  CHECK(find(cache, engram::row_key(2, 5)) == nullptr);
}

TEST_CASE("the budget holds everything, and at most 24 bytes a row are not rows") {
  for (const std::uint64_t budget :
       {0ull, 1ull, 263ull, 264ull, 600ull, 1000ull, 4096ull, 50'000ull, 1ull << 20, 64ull << 20}) {
    CAPTURE(budget);
    RowCache cache(options_of(budget));
    REQUIRE(cache.valid());
    std::mt19937_64 random(1);
    for (std::uint64_t i = 0; i < cache.capacity() * 3; ++i) {
      const std::uint64_t row = random() % (cache.capacity() * 2 + 1);
      cache.admit(engram::row_key(1, row), row_of(row).data());
    }
    const RowCache::Usage usage = cache.usage();
    CHECK(usage.used_bytes <= budget);
    CHECK(usage.rows <= cache.capacity());
    if (budget >= 1 << 20) {
      CHECK(usage.rows >= cache.capacity() * 97 / 100);
      CHECK((budget - cache.capacity() * 264) <= cache.capacity() * 24);
    }
  }
}

TEST_CASE("hot rows survive a scan") {
  RowCache cache(options_of(1 << 20));
  const std::uint64_t hot = cache.capacity() / 2;
  for (int round = 0; round < 4; ++round) {
    for (std::uint64_t row = 0; row < hot; ++row) {
      if (find(cache, engram::row_key(1, row)) == nullptr) cache.admit(engram::row_key(1, row), row_of(row).data());
    }
  }
  for (std::uint64_t row = 0; row < cache.capacity() * 2; ++row) {
    cache.admit(engram::row_key(2, row), row_of(row).data());
  }
  std::uint64_t kept = 0;
  for (std::uint64_t row = 0; row < hot; ++row) kept += find(cache, engram::row_key(1, row)) != nullptr ? 1 : 0;
  // Those in the main region stay; a twentieth of the slots may have been in the small one still.
  CHECK(kept >= hot * 7 / 10);
}

TEST_CASE("keys that share buckets and tags are told apart") {
  // A tiny index forces collisions; every answer must be the key's own row or a miss.
  RowCache cache(options_of(30'000));
  std::mt19937_64 random(9);
  std::uint64_t found = 0;
  for (int i = 0; i < 200'000; ++i) {
    const std::uint64_t row = random() % 5000;
    const std::uint8_t* bytes = find(cache, engram::row_key(3, row));
    if (bytes == nullptr) {
      cache.admit(engram::row_key(3, row), row_of(row).data());
    } else {
      ++found;
      REQUIRE(std::memcmp(bytes, row_of(row).data(), 264) == 0);
    }
  }
  CHECK(found > 0);
}

TEST_CASE("rows of any size") {
  for (const std::uint32_t row_bytes : {16u, 17u, 160u, 65536u}) {
    RowCache cache(options_of(std::uint64_t{row_bytes} * 100, row_bytes));
    for (std::uint64_t row = 0; row < 500; ++row) {
      cache.admit(engram::row_key(1, row), row_of(row, row_bytes).data());
      const std::uint8_t* found = find(cache, engram::row_key(1, row));
      if (found != nullptr) CHECK(std::memcmp(found, row_of(row, row_bytes).data(), row_bytes) == 0);
    }
    CHECK(cache.usage().rows > 20);
  }
}

TEST_CASE("a saved list fills the cache, both its regions, and the hottest rows stay") {
  RowCache::Options options;
  options.simulated_rows = 10'000;
  RowCache cache(options);
  for (std::uint64_t row = 0; row < 20'000; ++row) cache.admit(engram::row_key(1, row), nullptr, true);
  CHECK(cache.usage().rows == 10'000);
  std::uint64_t hottest = 0;
  for (std::uint64_t row = 0; row < 8'000; ++row) hottest += find(cache, engram::row_key(1, row)) != nullptr;
  // A few rows in a hundred find both places of the index taken.
  CHECK(hottest > 7'500);
  // Rows that come back from the ghosts get in, once the hand has taken the saved rows' hits.
  std::uint64_t back = 0;
  for (int round = 0; round < 3; ++round) {
    for (std::uint64_t row = 0; row < 2'000; ++row) cache.admit(engram::row_key(2, row), nullptr);
  }
  for (std::uint64_t row = 0; row < 2'000; ++row) back += find(cache, engram::row_key(2, row)) != nullptr;
  CHECK(back > 1'000);
}

TEST_CASE("a simulated cache keeps keys alone") {
  RowCache::Options options;
  options.row_bytes = 264;
  options.simulated_rows = 10'000;
  RowCache cache(options);
  CHECK(cache.capacity() == 10'000);
  for (std::uint64_t row = 0; row < 30'000; ++row) cache.admit(engram::row_key(1, row), nullptr);
  // The index gives up some rows where both places for a key are full; the main region waits for promotions then.
  CHECK(cache.usage().rows > 9'300);
  CHECK(cache.usage().used_bytes < 10'000 * 40);
}

TEST_CASE("a simulation counts the hits of an order of look-ups") {
  CHECK(engram_simulation_create(0) == nullptr);
  engram_simulation* simulation = engram_simulation_create(100);
  REQUIRE(simulation != nullptr);
  const std::vector<std::int64_t> keys = {1, 2, 1, -1, 2, 3, 0, 0, -5};
  CHECK(engram_simulation_run(simulation, keys.data(), keys.size()) == 3);
  CHECK(engram_simulation_run(simulation, keys.data(), keys.size()) == 7);
  std::vector<std::int64_t> once(100'000);
  for (std::size_t i = 0; i < once.size(); ++i) once[i] = static_cast<std::int64_t>(1000 + i);
  CHECK(engram_simulation_run(simulation, once.data(), once.size()) == 0);
  engram_simulation_destroy(simulation);
}

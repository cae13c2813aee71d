// Budgets that change and layers that come and go while clients fetch.
#include <algorithm>
#include <numeric>
#include <random>

#include "engine_fixture.h"

using namespace engram_test;

namespace {

engram_engine_counters engine_counters(const TestEngine& engine) {
  engram_engine_counters counters{};
  engram_engine_read_counters(engine.get(), &counters);
  return counters;
}

std::vector<std::int64_t> first_rows(std::int64_t count) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

std::vector<std::uint64_t> hot_rows(const TestEngine& engine, std::uint64_t piece) {
  std::vector<std::uint64_t> all;
  std::vector<std::uint64_t> rows(piece);
  std::uint64_t cursor = 0;
  while (const std::uint64_t count =
             engram_engine_hot_rows(engine.get(), engine.handles[0], &cursor, rows.data(), piece)) {
    all.insert(all.end(), rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(count));
  }
  return all;
}

}  // namespace

TEST_CASE("a new budget takes effect under load, and memory returns") {
  const TableFile table(20'000);
  const std::uint64_t all = 20'000 * 264;
  TestEngine engine({&table}, small_options(all / 2));
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> batches{0};
  std::thread load([&] {
    BareClient client(engine.get());
    std::mt19937_64 random(1);
    while (!stop.load()) {
      std::vector<std::int64_t> ids(1 + random() % 700);
      for (auto& id : ids) id = static_cast<std::int64_t>(random() % 20'000);
      if (client.fetch(engine.handles[0], ids) != ENGRAM_STATUS_OK || !reply_is(table, client.reply(0), ids)) ++wrong;
      ++batches;
    }
  });
  char error[256] = "";
  for (const std::uint64_t budget : {all / 10, std::uint64_t{0}, all, all / 4, all * 2, all / 50}) {
    const std::uint64_t before = batches.load();
    REQUIRE(engram_engine_place(engine.get(), budget, error, sizeof error) == 0);
    CHECK(eventually([&] { return batches.load() > before + 5; }));
    const engram_engine_counters counters = engine_counters(engine);
    CHECK(counters.budget_bytes == budget);
    CHECK(counters.used_bytes <= budget + (budget >= all ? 4096 : 0));
    if (budget >= all) CHECK(eventually([&] { return engine.counters().tier == ENGRAM_TIER_RESIDENT; }));
    if (budget < all) CHECK(engine.counters().tier == ENGRAM_TIER_CACHED);
  }
  stop.store(true);
  load.join();
  CHECK(wrong.load() == 0);
}

TEST_CASE("the same budget keeps the cached rows") {
  const TableFile table(2000);
  TestEngine engine({&table}, small_options(300'000));
  BareClient client(engine.get());
  REQUIRE(client.fetch(engine.handles[0], first_rows(500)) == ENGRAM_STATUS_OK);
  char error[256] = "";
  REQUIRE(engram_engine_place(engine.get(), 300'000, error, sizeof error) == 0);
  REQUIRE(client.fetch(engine.handles[0], first_rows(500)) == ENGRAM_STATUS_OK);
  CHECK(engine.counters().dram_hits == 500);
}

TEST_CASE("hot rows are listed hottest first and warm another engine") {
  const TableFile table(2000);
  TestEngine engine({&table}, small_options(300'000));
  BareClient client(engine.get());
  REQUIRE(client.fetch(engine.handles[0], first_rows(800)) == ENGRAM_STATUS_OK);
  for (int round = 0; round < 3; ++round) REQUIRE(client.fetch(engine.handles[0], first_rows(100)) == ENGRAM_STATUS_OK);
  const std::vector<std::uint64_t> hot = hot_rows(engine, 64);
  REQUIRE(hot.size() == 800);
  std::vector<std::uint64_t> sorted = hot;
  std::sort(sorted.begin(), sorted.end());
  CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
  for (std::size_t i = 0; i < 100; ++i) CHECK(hot[i] < 100);

  TestEngine other({&table}, small_options(300'000));
  CHECK(engram_engine_warm(other.get(), other.handles[0], hot.data(), static_cast<std::uint32_t>(hot.size()), 20'000) ==
        ENGRAM_STATUS_OK);
  BareClient second(other.get());
  REQUIRE(second.fetch(other.handles[0], first_rows(800)) == ENGRAM_STATUS_OK);
  CHECK(reply_is(table, second.reply(0), first_rows(800)));
  // Nearly all: a row whose two index buckets are full takes another's place.
  CHECK(other.counters().dram_hits >= 790);
  CHECK(other.counters().nvme_reads == other.counters().dram_misses);
  CHECK(other.counters().prefetch_reads == 0);
  CHECK(other.counters().background_reads > 0);
  CHECK(other.counters().requests == 1);
}

TEST_CASE("a layer is replaced under load: each batch is answered from one generation, old handles turn stale") {
  const TableFile old_table(3000, 256, 8, 1);
  const TableFile new_table(3000, 256, 8, 2);  // other rows at the same ids
  for (const std::uint64_t budget : {std::uint64_t{200'000}, std::uint64_t{3000} * 264}) {
    TestEngine engine({&old_table}, small_options(budget));
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> wrong{0};
    std::atomic<std::uint64_t> stale{0};
    std::atomic<std::uint64_t> new_batches{0};
    std::atomic<std::uint32_t> new_handle{0};
    std::thread load([&] {
      BareClient client(engine.get());
      std::mt19937_64 random(2);
      std::uint32_t handle = engine.handles[0];
      while (!stop.load()) {
        std::vector<std::int64_t> ids(1 + random() % 900);
        for (auto& id : ids) id = static_cast<std::int64_t>(random() % 3000);
        const std::uint32_t status = client.fetch(handle, ids);
        if (status == ENGRAM_STATUS_STALE) {
          ++stale;
          handle = new_handle.load();
          continue;
        }
        const TableFile& table = handle == engine.handles[0] ? old_table : new_table;
        if (status != ENGRAM_STATUS_OK || !reply_is(table, client.reply(0), ids)) ++wrong;
        if (&table == &new_table) ++new_batches;
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    char error[256] = "";
    const int file = new_table.descriptor();
    const engram_layer_options options = new_table.layer_options(&file);
    std::uint32_t handle = 0;
    REQUIRE(engram_engine_add_layer(engine.get(), &options, &handle, error, sizeof error) == 0);
    new_handle.store(handle);
    REQUIRE(engram_engine_retire_layer(engine.get(), engine.handles[0], 20'000) == 0);
    REQUIRE(engram_engine_place(engine.get(), budget, error, sizeof error) == 0);
    CHECK(eventually([&] { return new_batches.load() > 20; }));
    stop.store(true);
    load.join();
    CHECK(wrong.load() == 0);
    CHECK(stale.load() == 1);
    engram_layer_counters counters[2] = {};
    CHECK(engram_engine_layer_counters(engine.get(), counters, 2) == 1);
    CHECK(counters[0].handle == handle);
    CHECK(engine_counters(engine).used_bytes <= budget + 4096);
  }
}

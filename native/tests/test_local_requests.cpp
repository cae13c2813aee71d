// Requests made inside the daemon: the same rows and errors as over a ring, told by completions.
#include <map>

#include "local_fetch.h"

using namespace engram_test;

TEST_CASE("requests inside the daemon give the same rows") {
  const TableFile table(1000);
  for (const std::uint64_t budget : {0, 1 << 17, 1 << 20}) {
    CAPTURE(budget);
    TestEngine engine({&table}, small_options(budget));
    const std::vector<std::int64_t> ids{4, -1, 999};
    const engram_request request = fetch_request(engine.handles[0], ids.size());
    const Completion done = fetch_local(engine.get(), request, ids);
    REQUIRE(done.failure.status == ENGRAM_STATUS_OK);
    REQUIRE(done.bytes == ids.size() * table.row_bytes());
    CHECK(reply_is(table, done.rows.get(), ids));
    CHECK(engine.counters().rows == ids.size());
  }
}

TEST_CASE("small fetches of resident rows are served at once, and counted like others") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 20));
  REQUIRE(eventually([&] { return engine.counters().tier == ENGRAM_TIER_RESIDENT; }));
  bool at_once = false;
  engram_request request = fetch_request(engine.handles[0], 4);
  Completion done = fetch_local(engine.get(), request, {7, -1, 7, 999}, &at_once);
  CHECK(at_once);
  REQUIRE(done.failure.status == ENGRAM_STATUS_OK);
  CHECK(reply_is(table, done.rows.get(), {7, -1, 7, 999}));
  done = fetch_local(engine.get(), request, {7, 1, 1000, 999}, &at_once);
  CHECK(at_once);
  CHECK(done.failure.status == ENGRAM_STATUS_ROW_ID);
  CHECK(done.failure.position == 2);
  CHECK(done.rows == nullptr);

  const std::vector<std::int64_t> block(512, 3);
  fetch_local(engine.get(), fetch_request(engine.handles[0], 512), block, &at_once);
  CHECK(at_once);
  // Not everything: a large one, a prefetch, and what a worker must refuse.
  const std::vector<std::int64_t> large(513, 3);
  done = fetch_local(engine.get(), fetch_request(engine.handles[0], 513), large, &at_once);
  CHECK(!at_once);
  CHECK(reply_is(table, done.rows.get(), large));
  request.operation = ENGRAM_OPERATION_PREFETCH;
  fetch_local(engine.get(), request, {1, 2, 3, 4}, &at_once);
  CHECK(!at_once);
  request.operation = ENGRAM_OPERATION_FETCH;
  request.layout = 9;
  CHECK(fetch_local(engine.get(), request, {7, -1, 7, 999}, &at_once).failure.status == ENGRAM_STATUS_BAD_REQUEST);
  CHECK(!at_once);

  const engram_layer_counters counters = engine.counters();
  CHECK(counters.requests == 6);
  CHECK(counters.rows == 4 + 512 + 513);
  CHECK(counters.rows_zero == 1);
  CHECK(counters.rows_unique == 2 + 1 + 1);
  CHECK(counters.dram_hits == 3 + 512 + 513);
  CHECK(counters.errors[ENGRAM_STATUS_ROW_ID] == 1);
  CHECK(counters.errors[ENGRAM_STATUS_BAD_REQUEST] == 1);
  engram_engine_counters all{};
  engram_engine_read_counters(engine.get(), &all);
  CHECK(all.latency[0].count == 1);
  CHECK(all.latency[1].count == 2);

  REQUIRE(engram_engine_retire_layer(engine.get(), engine.handles[0], 20'000) == 0);
  CHECK(fetch_local(engine.get(), fetch_request(engine.handles[0], 1), {1}).failure.status == ENGRAM_STATUS_STALE);
}

TEST_CASE("what fails has no rows, and says why") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 17));
  const std::vector<std::int64_t> bad{4, 1000, 2};
  engram_request request = fetch_request(engine.handles[0], bad.size());
  const Completion done = fetch_local(engine.get(), request, bad);
  CHECK(done.failure.status == ENGRAM_STATUS_ROW_ID);
  CHECK(done.failure.position == 1);
  CHECK(done.failure.row_id == 1000);
  CHECK(done.rows == nullptr);
  CHECK(done.bytes == 0);

  request.layout = 9;
  CHECK(fetch_local(engine.get(), request, bad).failure.status == ENGRAM_STATUS_BAD_REQUEST);
  // These do not get as far as a worker.
  engram_completion none{};
  request.id_bytes = 5;
  CHECK(engram_engine_submit(engine.get(), &request, bad.data(), 1, &none) == ENGRAM_STATUS_BAD_REQUEST);
  request = fetch_request(engine.handles[0] + 1, bad.size());
  CHECK(engram_engine_submit(engine.get(), &request, bad.data(), 1, &none) == ENGRAM_STATUS_UNKNOWN_TABLE);
  request = fetch_request(engine.handles[0], 2 << 20);
  CHECK(engram_engine_submit(engine.get(), &request, bad.data(), 1, &none) == ENGRAM_STATUS_BAD_REQUEST);
  CHECK(take_completions(engine.get(), 50).empty());
}

TEST_CASE("a prefetch completes without rows") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(1 << 17));
  const std::vector<std::int64_t> ids{1, 500, 999};
  engram_request request = fetch_request(engine.handles[0], ids.size());
  request.operation = ENGRAM_OPERATION_PREFETCH;
  const Completion done = fetch_local(engine.get(), request, ids);
  CHECK(done.failure.status == ENGRAM_STATUS_OK);
  CHECK(done.rows == nullptr);
  CHECK(eventually([&] { return engine.counters().prefetch_reads == 3; }));
}

TEST_CASE("many are in flight at once, each with its tag; rows outlive their engine") {
  const TableFile table(1000);
  std::map<std::uint64_t, Completion> done;
  {
    TestEngine engine({&table}, small_options(0));
    const engram_request request = fetch_request(engine.handles[0], 3);
    engram_completion later{};
    for (std::int64_t tag = 0; tag < 200; ++tag) {
      const std::vector<std::int64_t> ids{tag, 999 - tag, -1};
      REQUIRE(engram_engine_submit(engine.get(), &request, ids.data(), static_cast<std::uint64_t>(tag), &later) == 0);
      REQUIRE(later.failure.status == ENGRAM_STATUS_EMPTY);
    }
    while (done.size() < 200) {
      std::vector<Completion> taken = take_completions(engine.get());
      for (Completion& one : taken) REQUIRE(done.emplace(one.tag, std::move(one)).second);
    }
  }
  for (std::int64_t tag = 0; tag < 200; ++tag) {
    const Completion& one = done.at(static_cast<std::uint64_t>(tag));
    REQUIRE(one.failure.status == ENGRAM_STATUS_OK);
    REQUIRE(reply_is(table, one.rows.get(), {tag, 999 - tag, -1}));
  }
}

TEST_CASE("an engine ends with requests submitted and completions not taken") {
  const TableFile table(1000);
  for (int round = 0; round < 20; ++round) {
    TestEngine engine({&table}, small_options(0));
    const engram_request request = fetch_request(engine.handles[0], 2);
    engram_completion later{};
    for (std::int64_t tag = 0; tag < 20; ++tag) {
      const std::vector<std::int64_t> ids{tag, tag * 40};
      REQUIRE(engram_engine_submit(engine.get(), &request, ids.data(), static_cast<std::uint64_t>(tag), &later) == 0);
      REQUIRE(later.failure.status == ENGRAM_STATUS_EMPTY);
    }
  }
}

TEST_CASE("draining answers what runs and refuses what comes") {
  const TableFile table(1000);
  TestEngine engine({&table}, small_options(0));
  REQUIRE(engram_engine_drain(engine.get(), 20'000) == 0);
  CHECK(fetch_local(engine.get(), fetch_request(engine.handles[0], 1), {1}).failure.status == ENGRAM_STATUS_STOPPING);
}

// The ring client's fetches of any size and its prefetch, against a double of the daemon (see fake_daemon.h).
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "ring_client_fixture.h"

using namespace engram::testing;

TEST_CASE("fetch of any size, whole and in parts") {
  FakeDaemon daemon;
  Client client(daemon);
  for (const std::size_t count : {1u, 100u, 992u, 993u, 5000u}) {
    const std::vector<int64_t> ids = some_ids(count);
    std::vector<uint8_t> rows(count * kRowBytes, 0xEE);
    engram_fetch fetch = fetch_of(ids, rows.data());
    REQUIRE(engram_fetch_run(client.session, &fetch, -1, &client.error) == 0);
    CHECK(rows_match(rows.data(), ids));
  }
  CHECK(client.usage().open_tickets == 0);
  uint64_t rows = 0;
  const auto requests = daemon.requests();
  const uint32_t parts = requests.back().part_count;
  CHECK(parts > 1);
  for (uint32_t i = 0; i < parts; ++i) {
    const engram_request& part = requests[requests.size() - parts + i];
    CHECK(part.part_index == i);
    CHECK(part.total_rows == 5000);
    CHECK(part.request_id == requests.back().request_id);
    rows += part.row_count;
  }
  CHECK(rows == 5000);
}

TEST_CASE("fetch in split layout and in parts") {
  FakeDaemon daemon;
  Client client(daemon);
  const std::vector<int64_t> ids = some_ids(3000);
  std::vector<uint8_t> values(ids.size() * 256), scales(ids.size() * 8);
  engram_fetch fetch = fetch_of(ids, values.data(), scales.data());
  REQUIRE(engram_fetch_run(client.session, &fetch, -1, &client.error) == 0);
  bool equal = true;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    for (uint64_t j = 0; j < 256; ++j) equal &= values[i * 256 + j] == row_byte(ids[i], j);
    for (uint64_t j = 0; j < 8; ++j) equal &= scales[i * 8 + j] == row_byte(ids[i], 256 + j);
  }
  CHECK(equal);
}

TEST_CASE("a fetch copies what is ready before the rest comes, and trusts it only once all is there") {
  FakeOptions options;
  options.arena_bytes = 4 << 20;
  options.max_reply_bytes = 1 << 20;
  FakeDaemon daemon(options);
  engram_error error{};
  const engram_connect_options with_spin{0, 2000, 10'000'000, "test", 0, 0};
  engram_session* session = engram_connect(daemon.path.c_str(), &with_spin, &error);
  REQUIRE(session != nullptr);
  bool copied_early = false;
  daemon.at_half = [&] {
    copied_early = eventually([&] {
      engram_session_totals totals;
      engram_session_read_totals(session, &totals);
      return totals.copy_ns > 0;
    });
  };
  for (const uint32_t layout : {ENGRAM_LAYOUT_PACKED, ENGRAM_LAYOUT_SPLIT}) {
    CAPTURE(layout);
    const std::vector<int64_t> ids = some_ids(3001);
    std::vector<uint8_t> rows(ids.size() * kRowBytes, 0xEE);
    std::vector<uint8_t> scales(ids.size() * (kRowBytes - kValueBytes), 0xEE);
    engram_fetch fetch = fetch_of(ids, rows.data(), layout == ENGRAM_LAYOUT_SPLIT ? scales.data() : nullptr);
    REQUIRE(engram_fetch_run(session, &fetch, -1, &error) == 0);
    CHECK(copied_early);
    if (layout == ENGRAM_LAYOUT_PACKED) CHECK(rows_match(rows.data(), ids));
    bool match = true;
    for (std::size_t i = 0; layout == ENGRAM_LAYOUT_SPLIT && i < ids.size(); ++i) {
      for (uint64_t j = 0; j < kRowBytes; ++j) {
        match &= (j < kValueBytes ? rows[i * kValueBytes + j]
                                  : scales[i * (kRowBytes - kValueBytes) + j - kValueBytes]) == row_byte(ids[i], j);
      }
    }
    CHECK(match);
    // Rows were copied, and then one cannot be had.
    std::vector<int64_t> bad = ids;
    bad.back() = static_cast<int64_t>(kRows);
    fetch = fetch_of(bad, rows.data(), layout == ENGRAM_LAYOUT_SPLIT ? scales.data() : nullptr);
    CHECK(engram_fetch_run(session, &fetch, -1, &error) == ENGRAM_STATUS_ROW_ID);
    CHECK(error.position == bad.size() - 1);
  }
  engram_session_free(session);
}

TEST_CASE("a bad id in a split fetch refuses the whole before anything is sent") {
  FakeDaemon daemon;
  Client client(daemon);
  std::vector<int64_t> ids = some_ids(3000);
  ids[2500] = int64_t{1} << 40;
  std::vector<uint8_t> rows(ids.size() * kRowBytes);
  engram_fetch fetch = fetch_of(ids, rows.data());
  CHECK(engram_fetch_run(client.session, &fetch, -1, &client.error) == ENGRAM_STATUS_ROW_ID);
  CHECK(client.error.position == 2500);
  CHECK(client.error.row_id == int64_t{1} << 40);
  CHECK(daemon.taken == 0);
}

TEST_CASE("find_bad_id at the edges of the types") {
  const auto find32 = [](std::vector<int32_t> ids, uint64_t rows) {
    return engram_find_bad_id(ids.data(), 4, ids.size(), rows);
  };
  const auto find64 = [](std::vector<int64_t> ids, uint64_t rows) {
    return engram_find_bad_id(ids.data(), 8, ids.size(), rows);
  };
  CHECK(find32({-1, 0, 9}, 10) == -1);
  CHECK(find32({-1, 10}, 10) == 1);
  CHECK(find32({-2}, 10) == 0);
  CHECK(find32({INT32_MIN}, UINT64_MAX) == 0);
  CHECK(find32({INT32_MAX, INT32_MIN}, uint64_t{1} << 31) == 1);
  CHECK(find32({INT32_MAX}, (uint64_t{1} << 31) - 1) == 0);
  CHECK(find64({-1, INT64_MAX - 1}, INT64_MAX) == -1);
  CHECK(find64({INT64_MAX}, INT64_MAX) == 0);
  CHECK(find64({0, INT64_MIN}, INT64_MAX) == 1);
  std::vector<int64_t> many(5000, 3);
  many[4999] = 10;
  CHECK(find64(many, 10) == 4999);
}

TEST_CASE("an interrupted fetch goes on, or is given up without a leak") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const std::vector<int64_t> ids = some_ids(4000);
  std::vector<uint8_t> rows(ids.size() * kRowBytes);
  engram_fetch fetch = fetch_of(ids, rows.data());
  CHECK(engram_fetch_run(client.session, &fetch, 30, &client.error) == ENGRAM_STATUS_TIMEOUT);
  CHECK(client.usage().open_tickets == 3);
  daemon.hold = false;
  CHECK(engram_fetch_run(client.session, &fetch, -1, &client.error) == 0);
  CHECK(rows_match(rows.data(), ids));
  daemon.hold = true;
  fetch.started = 0;
  CHECK(engram_fetch_run(client.session, &fetch, 30, &client.error) == ENGRAM_STATUS_TIMEOUT);
  engram_fetch_cancel(client.session, &fetch);
  CHECK(client.usage().zombie_tickets == 3);
  daemon.hold = false;
  CHECK(eventually([&] { return client.usage().zombie_tickets == 0; }));
}

TEST_CASE("prefetch takes no room in the arena") {
  FakeDaemon daemon;
  Client client(daemon);
  const std::vector<int64_t> ids = some_ids(50);
  engram_fetch fetch{};
  fetch.layer = &kLayer;
  fetch.ids = ids.data();
  fetch.row_count = ids.size();
  fetch.id_bytes = 8;
  fetch.operation = ENGRAM_OPERATION_PREFETCH;
  CHECK(engram_fetch_run(client.session, &fetch, -1, &client.error) == 0);
  CHECK(daemon.requests().at(0).operation == ENGRAM_OPERATION_PREFETCH);
}

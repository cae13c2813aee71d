// The ring client against a double of the daemon (see fake_daemon.h); tests/client/ runs it against the real one.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ring/extents.h"
#include "ring_client_fixture.h"

using namespace engram::testing;
using engram::ExtentAllocator;
using engram::UniqueFd;

TEST_CASE("extents: lowest first, aligned, coalescing by themselves") {
  ExtentAllocator extents(1000);
  CHECK(*extents.take(10) == 0);
  CHECK(*extents.take(64) == 64);
  CHECK(*extents.take(65) == 128);
  CHECK(*extents.take(0) == 0);
  extents.give_back(64, 64);
  CHECK(*extents.take(65) == 256);
  CHECK(*extents.take(64) == 64);
  CHECK(!extents.take(1001));
  CHECK(!extents.take(700));
  CHECK(*extents.take(1000 - 384) == 384);
  CHECK(!extents.take(1));
  extents.give_back(0, 10);
  CHECK(*extents.take(1) == 0);
  CHECK(extents.used_bytes() == 64 + 64 + 128 + 128 + 640);
}

TEST_CASE("submit, wait, release") {
  FakeDaemon daemon;
  Client client(daemon);
  REQUIRE(client.session != nullptr);
  CHECK(engram_session_check(client.session, nullptr) == 0);
  const std::vector<int64_t> ids{3, -1, 999, 3};
  const int64_t ticket = client.submit(ids);
  REQUIRE(ticket >= 0);
  const uint8_t* rows = client.wait(ticket);
  REQUIRE(rows != nullptr);
  CHECK(rows_match(rows, ids));
  CHECK(client.wait(ticket) == rows);
  CHECK(client.usage().open_tickets == 1);
  engram_release(client.session, ticket);
  engram_release(client.session, ticket);
  CHECK(client.usage().open_tickets == 0);
  CHECK(client.usage().arena_bytes == 0);
  CHECK(client.usage().ids_bytes == 0);
  CHECK(client.wait(ticket) == nullptr);
  CHECK(client.error.status == ENGRAM_CLIENT_CLOSED);
  const engram_request sent = daemon.requests().at(0);
  CHECK(sent.part_count == 1);
  CHECK(sent.total_rows == 4);
  CHECK(sent.reserved == 0);
}

TEST_CASE("ids of 4 bytes, split layout") {
  FakeDaemon daemon;
  Client client(daemon);
  const std::vector<int32_t> ids{5, -1, 6};
  const int64_t ticket =
      engram_submit(client.session, &kLayer, ids.data(), 4, ids.size(), ENGRAM_LAYOUT_SPLIT, 1000, nullptr);
  const uint8_t* rows = client.wait(ticket);
  REQUIRE(rows != nullptr);
  CHECK(rows[0] == row_byte(5, 0));
  CHECK(rows[256] == 0);
  CHECK(rows[3 * 256] == row_byte(5, 256));
  CHECK(rows[3 * 256 + 2 * 8 + 7] == row_byte(6, 263));
}

TEST_CASE("errors of the daemon arrive with their details") {
  FakeDaemon daemon;
  Client client(daemon);
  const int64_t ticket = client.submit({1, 2, 1000, -5});
  CHECK(client.wait(ticket) == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_ROW_ID);
  CHECK(client.error.position == 2);
  CHECK(client.error.row_id == 1000);
  engram_release(client.session, ticket);
  daemon.status = 77;
  CHECK(client.wait(client.submit({1})) == nullptr);
  CHECK(client.error.status == ENGRAM_CLIENT_PROTOCOL);
}

TEST_CASE("arguments are checked before anything is sent") {
  FakeDaemon daemon;
  Client client(daemon);
  const uint64_t most = engram_session_ticket_rows(client.session, kRowBytes);
  CHECK(most == (1 << 18) / kRowBytes);
  CHECK(client.submit(some_ids(most + 1)) == -ENGRAM_CLIENT_ARGUMENT);
  CHECK(std::string(client.error.text).find("max_ticket_rows") != std::string::npos);
  CHECK(client.submit({}) == -ENGRAM_CLIENT_ARGUMENT);
  CHECK(engram_submit(client.session, &kLayer, &most, 2, 1, 0, 0, nullptr) == -ENGRAM_CLIENT_ARGUMENT);
  CHECK(client.wait(-1) == nullptr);
  CHECK(client.wait(255) == nullptr);
  CHECK(daemon.taken == 0);
}

TEST_CASE("a wait ends at its timeout and can be taken up again") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const int64_t ticket = client.submit({1});
  CHECK(client.wait(ticket, 30) == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_TIMEOUT);
  CHECK(client.wait(ticket, 0) == nullptr);
  daemon.hold = false;
  CHECK(client.wait(ticket) != nullptr);
}

TEST_CASE("several threads wait for one ticket") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const int64_t ticket = client.submit({5});
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { served += engram_wait(client.session, ticket, 5000, nullptr) != nullptr; });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  daemon.hold = false;
  for (auto& thread : threads) thread.join();
  CHECK(served == 4);
}

TEST_CASE("a doorbell is rung only where the worker sleeps") {
  FakeDaemon daemon;
  Client client(daemon);
  REQUIRE(client.wait(client.submit({5})) != nullptr);
  CHECK(daemon.doorbell_count() == 0);
  daemon.set_asleep(true);
  REQUIRE(client.wait(client.submit({5})) != nullptr);
  CHECK(daemon.doorbell_count() == 1);
}

TEST_CASE("a dropped ticket's room is reused only after its completion") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const int64_t first = client.submit(some_ids(10));
  REQUIRE(eventually([&] { return daemon.taken == 1; }));
  engram_release(client.session, first);
  CHECK(client.usage().zombie_tickets == 1);
  const int64_t second = client.submit(some_ids(10));
  REQUIRE(eventually([&] { return daemon.taken == 2; }));
  const auto requests = daemon.requests();
  CHECK(requests[0].reply_offset != requests[1].reply_offset);
  CHECK(requests[0].ids_offset != requests[1].ids_offset);
  daemon.hold = false;
  REQUIRE(client.wait(second) != nullptr);
  CHECK(eventually([&] { return client.usage().zombie_tickets == 0; }));
  engram_release(client.session, second);
  CHECK(client.usage().arena_bytes == 0);
  const int64_t third = client.submit(some_ids(10));
  REQUIRE(client.wait(third) != nullptr);
  CHECK(daemon.requests()[2].reply_offset == 0);
}

TEST_CASE("a thread whose own tickets hold all slots is told so at once") {
  FakeDaemon daemon;
  Client client(daemon);
  std::vector<int64_t> tickets;
  for (int i = 0; i < 8; ++i) tickets.push_back(client.submit({i}));
  CHECK(client.submit({1}, 0) == -ENGRAM_STATUS_BUSY);
  CHECK(client.submit({1}, -1) == -ENGRAM_STATUS_BUSY);
  CHECK(std::string(client.error.text).find("unreleased tickets") != std::string::npos);
  // Another thread waits for the release.
  int64_t other = -1;
  std::thread thread([&] {
    const int64_t id = 1;
    other = engram_submit(client.session, &kLayer, &id, 8, 1, 0, -1, nullptr);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  engram_release(client.session, tickets[3]);
  thread.join();
  CHECK(other >= 0);
  // That thread has ended with its ticket, and the rest is ours: hopeless too.
  CHECK(client.submit({1}, -1) == -ENGRAM_STATUS_BUSY);
}

TEST_CASE("two threads that wait for each other's tickets do not hang") {
  FakeDaemon daemon;
  Client client(daemon);
  std::atomic<int> holding{0};
  std::atomic<int> busy{0};
  const auto work = [&] {
    std::vector<int64_t> tickets;
    const int64_t id = 1;
    for (int i = 0; i < 4; ++i) tickets.push_back(engram_submit(client.session, &kLayer, &id, 8, 1, 0, -1, nullptr));
    holding += 1;
    while (holding < 2) std::this_thread::yield();
    const int64_t more = engram_submit(client.session, &kLayer, &id, 8, 1, 0, -1, nullptr);
    if (more == -ENGRAM_STATUS_BUSY) busy += 1;
    for (const int64_t ticket : tickets) engram_release(client.session, ticket);
    if (more >= 0) engram_release(client.session, more);
  };
  std::thread one(work), two(work);
  one.join();
  two.join();
  CHECK(busy >= 1);
  CHECK(eventually([&] { return client.usage().open_tickets + client.usage().zombie_tickets == 0; }));
}

TEST_CASE("waiting for room ends at its limit") {
  FakeDaemon daemon;
  Client client(daemon);
  std::atomic<bool> stop{false};
  std::atomic<int> held{0};
  std::thread holder([&] {
    const int64_t id = 1;
    for (int i = 0; i < 8; ++i) engram_submit(client.session, &kLayer, &id, 8, 1, 0, -1, nullptr);
    held = 1;
    while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  while (held == 0) std::this_thread::yield();
  CHECK(client.submit({1}, 50) == -ENGRAM_STATUS_TIMEOUT);
  stop = true;
  holder.join();
}

TEST_CASE("fetch of any size, whole and in parts") {
  FakeDaemon daemon;
  Client client(daemon);
  for (const std::size_t count : {1u, 100u, 992u, 993u, 5000u}) {
    const std::vector<int64_t> ids = some_ids(count);
    std::vector<uint8_t> rows(count * kRowBytes, 0xEE);
    engram_fetch fetch{};
    fetch.layer = &kLayer;
    fetch.ids = ids.data();
    fetch.rows = rows.data();
    fetch.row_count = count;
    fetch.id_bytes = 8;
    fetch.operation = ENGRAM_OPERATION_FETCH;
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
  engram_fetch fetch{};
  fetch.layer = &kLayer;
  fetch.ids = ids.data();
  fetch.rows = values.data();
  fetch.scales = scales.data();
  fetch.row_count = ids.size();
  fetch.id_bytes = 8;
  fetch.layout = ENGRAM_LAYOUT_SPLIT;
  fetch.operation = ENGRAM_OPERATION_FETCH;
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
    engram_fetch fetch{};
    fetch.layer = &kLayer;
    fetch.ids = ids.data();
    fetch.rows = rows.data();
    fetch.scales = scales.data();
    fetch.row_count = ids.size();
    fetch.id_bytes = 8;
    fetch.layout = layout;
    fetch.operation = ENGRAM_OPERATION_FETCH;
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
    fetch = {};
    fetch.layer = &kLayer;
    fetch.ids = bad.data();
    fetch.rows = rows.data();
    fetch.scales = scales.data();
    fetch.row_count = bad.size();
    fetch.id_bytes = 8;
    fetch.layout = layout;
    fetch.operation = ENGRAM_OPERATION_FETCH;
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
  engram_fetch fetch{};
  fetch.layer = &kLayer;
  fetch.ids = ids.data();
  fetch.rows = rows.data();
  fetch.row_count = ids.size();
  fetch.id_bytes = 8;
  fetch.operation = ENGRAM_OPERATION_FETCH;
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
  engram_fetch fetch{};
  fetch.layer = &kLayer;
  fetch.ids = ids.data();
  fetch.rows = rows.data();
  fetch.row_count = ids.size();
  fetch.id_bytes = 8;
  fetch.operation = ENGRAM_OPERATION_FETCH;
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

TEST_CASE("the daemon's death ends a wait") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const int64_t ticket = client.submit({1});
  void (FakeDaemon::*end)() = nullptr;
  SUBCASE("owner died") {
    end = &FakeDaemon::die;
  }
  SUBCASE("crash with a core dump") {
    end = &FakeDaemon::crash;
  }
  SUBCASE("socket closed") {
    end = &FakeDaemon::hang_up;
  }
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    (daemon.*end)();
  });
  CHECK(client.wait(ticket, -1) == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_LOST);
  killer.join();
  CHECK(client.submit({1}) == -ENGRAM_STATUS_LOST);
  CHECK(engram_session_check(client.session, nullptr) == ENGRAM_STATUS_LOST);
}

TEST_CASE("rows of a completed ticket outlive the daemon") {
  FakeDaemon daemon;
  Client client(daemon);
  const int64_t ticket = client.submit({4});
  const uint8_t* rows = client.wait(ticket);
  REQUIRE(rows != nullptr);
  daemon.die();
  CHECK(rows_match(rows, {4}));
  CHECK(client.wait(ticket) == rows);
}

TEST_CASE("close ends other threads' waits") {
  FakeDaemon daemon;
  daemon.hold = true;
  Client client(daemon);
  const int64_t ticket = client.submit({1});
  std::thread closer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    engram_session_close(client.session);
  });
  CHECK(client.wait(ticket, -1) == nullptr);
  CHECK(client.error.status == ENGRAM_CLIENT_CLOSED);
  closer.join();
  engram_session_close(client.session);
  CHECK(client.submit({1}) == -ENGRAM_CLIENT_CLOSED);
}

TEST_CASE("a stale ticket is sent again") {
  FakeDaemon daemon;
  daemon.stale = 1;
  Client client(daemon);
  const std::vector<int64_t> ids{8, 9};
  const int64_t ticket = client.submit(ids);
  CHECK(client.wait(ticket) == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_STALE);
  CHECK(engram_session_refresh(client.session, &client.error) == 0);
  CHECK(engram_resubmit(client.session, ticket, &kLayer, &client.error) == 0);
  const uint8_t* rows = client.wait(ticket);
  REQUIRE(rows != nullptr);
  CHECK(rows_match(rows, ids));
  engram_layer other = kLayer;
  other.row_bytes = 128;
  CHECK(engram_resubmit(client.session, ticket, &other, &client.error) == ENGRAM_CLIENT_ARGUMENT);
}

TEST_CASE("the catalogue") {
  FakeDaemon daemon;
  Client client(daemon);
  engram_catalogue_record record;
  REQUIRE(engram_session_layers(client.session, &record, 1) == 1);
  CHECK(engram_session_layers(client.session, nullptr, 0) == 1);
  CHECK(std::string(record.name) == "fake");
  CHECK(record.rows == kRows);
  int64_t sizes[2];
  CHECK(engram_session_head_sizes(client.session, kHandle, sizes, 2) == 2);
  CHECK(sizes[1] == 600);
  CHECK(engram_session_head_sizes(client.session, 1, sizes, 2) == -1);
}

TEST_CASE("a child does not use its parent's session") {
  FakeDaemon daemon;
  Client client(daemon);
  const int64_t ticket = client.submit({1});
  REQUIRE(client.wait(ticket) != nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    engram_error error{};
    int faults = 0;
    faults += client.submit({1}) != -ENGRAM_CLIENT_CLOSED;
    faults += engram_wait(client.session, ticket, -1, &error) != nullptr || error.status != ENGRAM_CLIENT_CLOSED;
    faults += engram_session_check(client.session, nullptr) != ENGRAM_CLIENT_CLOSED;
    faults += engram_session_refresh(client.session, nullptr) != ENGRAM_CLIENT_CLOSED;
    engram_release(client.session, ticket);
    engram_session_close(client.session);
    engram_session_free(client.session);
    ::_exit(faults);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(engram_session_check(client.session, nullptr) == 0);
  const int64_t again = client.submit({2});
  CHECK(client.wait(again) != nullptr);
}

TEST_CASE("nobody answers, or not in time, or with a refusal") {
  engram_error error{};
  CHECK(engram_connect("/tmp/engram-no-such-socket", nullptr, &error) == nullptr);
  CHECK(error.status == ENGRAM_STATUS_LOST);
  CHECK(engram_connect(std::string(200, 'x').c_str(), nullptr, &error) == nullptr);
  CHECK(error.status == ENGRAM_CLIENT_ARGUMENT);
  {
    FakeOptions options;
    options.silent = true;
    FakeDaemon daemon(options);
    Client client(daemon, 50);
    CHECK(client.session == nullptr);
    CHECK(client.error.status == ENGRAM_STATUS_TIMEOUT);
  }
  FakeOptions options;
  options.refuse = true;
  FakeDaemon daemon(options);
  Client client(daemon);
  CHECK(client.session == nullptr);
  CHECK(client.error.status == ENGRAM_STATUS_BUSY);
  CHECK(std::string(client.error.text).find("limit of 3 sessions") != std::string::npos);
}

TEST_CASE("a hostile or foreign daemon gives an error") {
  std::vector<FakeOptions> cases;
  const auto with_welcome = [&](auto change) {
    FakeOptions options;
    options.change_welcome = change;
    cases.push_back(std::move(options));
  };
  with_welcome([](engram_welcome& w) { w.message.magic = 1; });
  with_welcome([](engram_welcome& w) { w.message.version = 2; });
  with_welcome([](engram_welcome& w) { w.message.kind = ENGRAM_KIND_CATALOGUE; });
  with_welcome([](engram_welcome& w) { w.message.bytes = 9; });
  with_welcome([](engram_welcome& w) { w.version = 2; });
  with_welcome([](engram_welcome& w) { w.worker = 64; });
  with_welcome([](engram_welcome& w) { w.state_bytes = 8192; });
  with_welcome([](engram_welcome& w) { w.state_bytes = 8; });
  with_welcome([](engram_welcome& w) { w.catalogue_bytes = UINT64_MAX; });
  with_welcome([](engram_welcome& w) { w.catalogue_bytes += 1; });
  with_welcome([](engram_welcome& w) { w.geometry.ring_bytes = UINT64_MAX; });
  with_welcome([](engram_welcome& w) { w.geometry.ring_bytes += 4096; });
  with_welcome([](engram_welcome& w) { w.geometry.arena_bytes *= 2; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 0; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 3; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 1u << 31; });
  with_welcome([](engram_welcome& w) { w.geometry.slot_count = 256; });
  with_welcome([](engram_welcome& w) { w.geometry.stream_slot_count = UINT32_MAX; });
  with_welcome([](engram_welcome& w) { w.geometry.submit_offset = 64; });
  with_welcome([](engram_welcome& w) { w.geometry.submit_offset = UINT64_MAX - 63; });
  with_welcome([](engram_welcome& w) { w.geometry.slots_offset += 4; });
  with_welcome([](engram_welcome& w) { w.geometry.ids_bytes = UINT64_MAX; });
  with_welcome([](engram_welcome& w) { w.geometry.ids_offset += 64; });
  with_welcome([](engram_welcome& w) { w.geometry.max_reply_bytes = w.geometry.arena_bytes + 1; });
  const auto with_header = [&](auto change) {
    FakeOptions options;
    options.change_header = change;
    cases.push_back(std::move(options));
  };
  with_header([](engram_ring_header& h) { h.magic = 0; });
  with_header([](engram_ring_header& h) { h.session += 1; });
  with_header([](engram_ring_header& h) { h.geometry.ids_bytes += 64; });
  const auto with_catalogue = [&](auto change) {
    FakeOptions options;
    options.change_catalogue = [change](std::vector<std::byte>& bytes) {
      engram_catalogue head;
      engram_catalogue_record record;
      std::memcpy(&head, bytes.data(), sizeof head);
      std::memcpy(&record, bytes.data() + sizeof head, sizeof record);
      change(head, record);
      std::memcpy(bytes.data(), &head, sizeof head);
      std::memcpy(bytes.data() + sizeof head, &record, sizeof record);
    };
    cases.push_back(std::move(options));
  };
  with_catalogue([](auto& head, auto&) { head.magic = 0; });
  with_catalogue([](auto& head, auto&) { head.version = 2; });
  with_catalogue([](auto& head, auto&) { head.record_count = UINT32_MAX; });
  with_catalogue([](auto& head, auto&) { head.record_count = 2; });
  with_catalogue([](auto& head, auto&) { head.record_bytes = 8; });
  with_catalogue([](auto& head, auto&) { head.bytes += 1; });
  with_catalogue([](auto&, auto& record) { std::memset(record.name, 'x', sizeof record.name); });
  with_catalogue([](auto&, auto& record) { record.row_bytes = 0; });
  with_catalogue([](auto&, auto& record) { record.value_bytes = record.row_bytes + 1; });
  with_catalogue([](auto&, auto& record) { record.rows = UINT64_MAX; });
  with_catalogue([](auto&, auto& record) { record.head_count = UINT32_MAX; });
  with_catalogue([](auto&, auto& record) { record.head_sizes_offset = UINT64_MAX; });
  with_catalogue([](auto&, auto& record) { record.head_sizes_offset += 8; });
  const auto with_descriptors = [&](auto change) {
    FakeOptions options;
    options.change_descriptors = change;
    cases.push_back(std::move(options));
  };
  with_descriptors([](auto& fds) { fds[ENGRAM_FD_CATALOGUE].reset(); });
  with_descriptors([](auto& fds) { fds[ENGRAM_FD_RING] = UniqueFd(::open("/dev/zero", O_RDWR)); });
  with_descriptors([](auto& fds) {  // could shrink under the client
    fds[ENGRAM_FD_ARENA] = UniqueFd(::memfd_create("bare", MFD_CLOEXEC));
    REQUIRE(::ftruncate(fds[ENGRAM_FD_ARENA].get(), 1 << 20) == 0);
  });
  with_descriptors([](auto& fds) {
    int pipe[2];
    REQUIRE(::pipe(pipe) == 0);
    ::close(pipe[0]);
    fds[ENGRAM_FD_DOORBELL] = UniqueFd(pipe[1]);
  });
  FakeOptions raw;
  for (const std::size_t size : {std::size_t{1}, sizeof(engram_welcome), std::size_t{4096}}) {
    raw.raw_answer.assign(size, std::byte{0xFF});
    cases.push_back(raw);
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(i);
    FakeDaemon daemon(cases[i]);
    Client client(daemon);
    CHECK(client.session == nullptr);
    CHECK(client.error.status == ENGRAM_CLIENT_PROTOCOL);
    CHECK(client.error.text[0] != 0);
  }
}

TEST_CASE("too few free descriptors give a clear error") {
  FakeDaemon daemon;
  const pid_t child = ::fork();
  if (child == 0) {
    // Room for the socket and two of the five descriptors.
    const int next = ::dup(0);
    ::close(next);
    const rlimit limit{static_cast<rlim_t>(next) + 3, static_cast<rlim_t>(next) + 3};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    engram_error error{};
    const bool refused = engram_connect(daemon.path.c_str(), nullptr, &error) == nullptr;
    const bool clear = error.status == ENGRAM_CLIENT_SYSTEM && std::strstr(error.text, "ulimit -n") != nullptr;
    ::_exit(refused && clear ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

// The ring client's tickets and their room, against a double of the daemon (see fake_daemon.h); tests/client/ runs it
// against the real one.
#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "ring/extents.h"
#include "ring_client_fixture.h"

using namespace engram::testing;
using engram::ExtentAllocator;

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

// Lanes of several streams beside ordinary requests, lanes that are opened and closed, and the end of it all, on one
// session of the ring client against a double of the daemon: what the watchdog's thread shares with everybody else.
#include <atomic>
#include <thread>
#include <vector>

#include "ring_client_fixture.h"

using namespace engram::testing;

namespace {

FakeOptions with_streams() {
  FakeOptions options;
  options.stream_slot_count = 6;
  return options;
}

// One use of a lane, as a stream makes it; what the completion word said.
uint32_t use(engram_session* session, const engram_lane& lane, const std::vector<int64_t>& ids, bool& is_exact) {
  engram_session_memory memory;
  engram_session_read_memory(session, &memory);
  auto* ring = static_cast<std::byte*>(memory.ring);
  const std::atomic_ref completion(*reinterpret_cast<uint32_t*>(ring + lane.completion_offset));
  std::memcpy(ring + lane.ids_offset, ids.data(), ids.size() * 8);
  std::atomic_ref(*reinterpret_cast<uint32_t*>(ring + lane.doorbell_offset)).store(1);
  uint32_t status;
  while ((status = completion.load()) == ENGRAM_STATUS_EMPTY) std::this_thread::yield();
  if (status == ENGRAM_STATUS_OK) {
    is_exact = rows_match(static_cast<const uint8_t*>(memory.arena) + lane.rows_offset, ids);
  }
  completion.store(ENGRAM_STATUS_EMPTY);
  return status;
}

// Opens a lane, uses it some times and closes it, until the session is over; returns the number of wrong replies.
int stream(engram_session* session, int seed, std::atomic<int>& uses) {
  int wrong = 0;
  for (int64_t turn = seed;; ++turn) {
    engram_lane lane{};
    const int opened = engram_lane_open(session, &kLayer, 4, 8, ENGRAM_LAYOUT_PACKED, 60'000, &lane, nullptr);
    if (opened == ENGRAM_STATUS_LOST || opened == ENGRAM_CLIENT_CLOSED) return wrong;
    if (opened != 0) return wrong + 1;
    bool is_lost = false;
    for (int64_t i = 0; i < 5 && !is_lost; ++i) {
      bool is_exact = true;
      const uint32_t status = use(session, lane, {turn % 1000, i, -1, (turn * 31 + i) % 1000}, is_exact);
      is_lost = status == ENGRAM_STATUS_LOST;
      if (!is_exact || (status != ENGRAM_STATUS_OK && !is_lost)) ++wrong;
      ++uses;
    }
    engram_lane_close(session, &lane);
    if (is_lost) return wrong;
  }
}

}  // namespace

TEST_CASE("streams, requests and the end of the session") {
  for (int round = 0; round < 6; ++round) {
    FakeDaemon daemon(with_streams());
    Client client(daemon, 5000, ENGRAM_CONNECT_STREAM_SLOTS);
    REQUIRE(client.session != nullptr);
    std::atomic<int> wrong{0};
    std::atomic<int> uses{0};
    std::atomic<int> requests{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) threads.emplace_back([&, t] { wrong += stream(client.session, t * 100, uses); });
    threads.emplace_back([&] {
      const std::vector<int64_t> ids = some_ids(40);
      while (true) {
        const int64_t ticket = engram_submit(client.session, &kLayer, ids.data(), 8, ids.size(), 0, -1, nullptr);
        if (ticket < 0) return;
        const void* rows = engram_wait(client.session, ticket, -1, nullptr);
        if (rows != nullptr && !rows_match(static_cast<const uint8_t*>(rows), ids)) ++wrong;
        engram_release(client.session, ticket);
        if (rows == nullptr) return;
        ++requests;
      }
    });
    CHECK(eventually([&] { return uses > 300 && requests > 50; }));
    switch (round % 3) {
      case 0:
        engram_session_close(client.session);
        break;
      case 1:
        daemon.hang_up();
        break;
      default:
        daemon.die();
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
  }
}

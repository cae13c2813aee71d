// Threads, forks and closing on one session of the ring client, against a double of the daemon (see fake_daemon.h).
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "ring_client_fixture.h"

using namespace engram::testing;

namespace {

FakeOptions small_arena() {
  FakeOptions options;
  options.arena_bytes = 1 << 18;
  options.max_reply_bytes = 1 << 17;
  return options;
}

// Submits, fetches and drops until told to stop; returns what went wrong.
int work(engram_session* session, int seed, int rounds, const std::atomic<bool>& stop) {
  int faults = 0;
  for (int i = 0; i < rounds && !stop; ++i) {
    const std::vector<int64_t> ids = some_ids(static_cast<std::size_t>(1 + (i * 37 + seed) % 400));
    if (i % 5 == 0) {
      std::vector<uint8_t> rows(ids.size() * kRowBytes);
      engram_fetch fetch = fetch_of(ids, rows.data());
      const int status = engram_fetch_run(session, &fetch, -1, nullptr);
      if (status == ENGRAM_CLIENT_CLOSED) return faults;
      if (status != 0 || !rows_match(rows.data(), ids)) ++faults;
      continue;
    }
    const int64_t ticket = engram_submit(session, &kLayer, ids.data(), 8, ids.size(), 0, -1, nullptr);
    if (ticket == -ENGRAM_CLIENT_CLOSED) return faults;
    if (ticket < 0) {
      ++faults;
      continue;
    }
    if (i % 7 != 0) {  // else dropped before its completion
      engram_error error{};
      const void* rows = engram_wait(session, ticket, -1, &error);
      if (rows == nullptr ? error.status != ENGRAM_CLIENT_CLOSED
                          : !rows_match(static_cast<const uint8_t*>(rows), ids)) {
        ++faults;
      }
    }
    engram_release(session, ticket);
  }
  return faults;
}

}  // namespace

TEST_CASE("many threads share one session") {
  FakeDaemon daemon(small_arena());
  engram_session* session = engram_connect(daemon.path.c_str(), nullptr, nullptr);
  REQUIRE(session != nullptr);
  const std::atomic<bool> stop{false};
  std::atomic<int> faults{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) threads.emplace_back([&, t] { faults += work(session, t, 300, stop); });
  for (auto& thread : threads) thread.join();
  CHECK(faults == 0);
  engram_session_usage usage;
  for (int i = 0; i < 5000; ++i) {
    engram_session_read_usage(session, &usage);
    if (usage.zombie_tickets == 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(usage.open_tickets == 0);
  CHECK(usage.arena_bytes == 0);
  CHECK(usage.ids_bytes == 0);
  engram_session_free(session);
}

TEST_CASE("a session is closed under busy threads") {
  for (int round = 0; round < 10; ++round) {
    FakeDaemon daemon(small_arena());
    engram_session* session = engram_connect(daemon.path.c_str(), nullptr, nullptr);
    REQUIRE(session != nullptr);
    const std::atomic<bool> stop{false};
    std::atomic<int> faults{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) threads.emplace_back([&, t] { faults += work(session, t, 1 << 20, stop); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    engram_session_close(session);
    for (auto& thread : threads) thread.join();
    CHECK(faults == 0);
    engram_session_free(session);
  }
}

#ifndef __SANITIZE_THREAD__  // which does not support a fork beside other threads
TEST_CASE("forks beside busy threads and new sessions") {
  FakeDaemon daemon(small_arena());
  engram_session* session = engram_connect(daemon.path.c_str(), nullptr, nullptr);
  REQUIRE(session != nullptr);
  std::atomic<bool> stop{false};
  std::atomic<int> faults{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) threads.emplace_back([&, t] { faults += work(session, t, 1 << 30, stop); });
  threads.emplace_back([&] {
    while (!stop) engram_session_free(engram_connect(daemon.path.c_str(), nullptr, nullptr));
  });
  for (int i = 0; i < 30; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      engram_error error{};
      const bool refused = engram_session_check(session, &error) == ENGRAM_CLIENT_CLOSED;
      engram_session_free(session);
      ::_exit(refused ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(faults == 0);
  engram_session_free(session);
}
#endif

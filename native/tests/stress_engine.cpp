// The whole engine under churn, in one process: several clients, two workers, a tiny cache, prefetches, sessions that
// end with requests in flight, the event loop's requests beside them. Every reply is compared. Made for TSAN and ASAN
// as well.
#include <map>
#include <random>

#include "local_fetch.h"

using namespace engram_test;

namespace {

std::uint64_t rounds() {
  const char* text = std::getenv("ENGRAM_STRESS_ROUNDS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 60;
}

}  // namespace

TEST_CASE("concurrent clients get exact rows while the cache churns") {
  const TableFile table(6000);
  for (const std::uint32_t reader : {ENGRAM_READER_AUTO, ENGRAM_READER_PREAD}) {
    engram_engine_options options = small_options(60'000);
    options.workers = 2;
    options.arena_bytes = 32 << 20;  // so that a batch can be large enough to be shared by both workers
    options.reader = reader;
    options.in_flight_cap = 32;
    TestEngine engine({&table}, options);
    std::atomic<std::uint64_t> wrong{0};
    std::atomic<std::uint64_t> batches{0};
    const auto client_thread = [&](std::uint64_t seed) {
      std::mt19937_64 random(seed);
      for (std::uint64_t life = 0; life < 3; ++life) {
        BareClient client(engine.get());
        for (std::uint64_t round = 0; round < rounds(); ++round) {
          // Up to three requests at once, in ranges of their own.
          std::vector<std::int64_t> ids[3];
          const std::uint32_t count = 1 + static_cast<std::uint32_t>(random() % 3);
          for (std::uint32_t slot = 0; slot < count; ++slot) {
            const std::uint64_t size_kind = random() % 12;
            ids[slot].resize(1 + random() % (size_kind == 0 ? 9000 : size_kind < 4 ? 1200 : 100));
            for (auto& id : ids[slot]) {
              const std::uint64_t kind = random() % 8;
              id = kind == 0 ? -1 : static_cast<std::int64_t>(kind < 5 ? random() % 50 : random() % 6000);
            }
            const bool prefetch = random() % 8 == 0;
            client.prepare(slot, engine.handles[0], ids[slot], std::uint64_t{slot} * 131072, std::uint64_t{slot} << 23,
                           ENGRAM_LAYOUT_PACKED, prefetch ? ENGRAM_OPERATION_PREFETCH : ENGRAM_OPERATION_FETCH);
            if (prefetch) ids[slot].clear();
            client.submit_only(slot);
          }
          for (std::uint32_t slot = 0; slot < count; ++slot) {
            if (client.wait(slot) != ENGRAM_STATUS_OK ||
                !reply_is(table, client.reply(std::uint64_t{slot} << 23), ids[slot])) {
              wrong.fetch_add(1);
            }
            batches.fetch_add(1);
          }
        }
        // The session ends with a request in flight.
        client.prepare(0, engine.handles[0], {1, 2, 3, 4000}, 0, 0);
        client.submit_only(0);
      }
    };
    // As the event loop: one thread submits and takes completions, with up to eight requests in flight.
    const auto event_loop = [&] {
      std::mt19937_64 random(99);
      std::map<std::uint64_t, std::vector<std::int64_t>> open;
      std::uint64_t tag = 0;
      while (tag < 6 * rounds() || !open.empty()) {
        while (tag < 6 * rounds() && open.size() < 8) {
          std::vector<std::int64_t> ids(1 + random() % (random() % 8 == 0 ? 3000 : 60));
          for (auto& id : ids) id = static_cast<std::int64_t>(random() % 6001) - 1;
          const engram_request request = fetch_request(engine.handles[0], ids.size());
          engram_completion later{};
          if (engram_engine_submit(engine.get(), &request, ids.data(), tag, &later) != 0) wrong.fetch_add(1);
          open.emplace(tag++, std::move(ids));
        }
        for (const Completion& done : take_completions(engine.get())) {
          if (done.failure.status != ENGRAM_STATUS_OK || !reply_is(table, done.rows.get(), open.at(done.tag))) {
            wrong.fetch_add(1);
          }
          open.erase(done.tag);
        }
      }
    };
    std::vector<std::thread> threads;
    threads.emplace_back(event_loop);
    for (std::uint64_t seed = 0; seed < 3; ++seed) threads.emplace_back(client_thread, seed + 1);
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong.load() == 0);
    CHECK(batches.load() > 0);
    CHECK(engine.counters().dram_hits > 0);
    engram_engine_counters counters{};
    CHECK(eventually([&] {
      engram_engine_read_counters(engine.get(), &counters);
      return counters.arena_count == 0 && counters.in_flight == 0;
    }));
  }
}

TEST_CASE("the event loop's requests are exact while rows move into DRAM and out of it") {
  const TableFile table(2000);
  engram_engine_options options = small_options(1 << 20);
  options.workers = 2;
  TestEngine engine({&table}, options);
  std::atomic<bool> done{false};
  std::thread mover([&] {
    while (!done.load()) {
      for (const std::uint64_t budget : {0, 1 << 20}) {
        char error[256] = "";
        if (engram_engine_place(engine.get(), budget, error, sizeof error) != 0) done.store(true);
        std::this_thread::sleep_for(std::chrono::milliseconds(budget == 0 ? 2 : 20));
      }
    }
  });
  std::mt19937_64 random(7);
  std::uint64_t at_once_count = 0;
  std::uint64_t later_count = 0;
  std::uint64_t wrong = 0;
  const auto end = engram::monotonic_ns() + 20'000'000'000;
  while ((at_once_count < rounds() || later_count < rounds()) && engram::monotonic_ns() < end) {
    std::vector<std::int64_t> ids(1 + random() % 60);
    for (auto& id : ids) id = static_cast<std::int64_t>(random() % 2001) - 1;
    bool at_once = false;
    const Completion taken = fetch_local(engine.get(), fetch_request(engine.handles[0], ids.size()), ids, &at_once);
    if (taken.failure.status != ENGRAM_STATUS_OK || !reply_is(table, taken.rows.get(), ids)) ++wrong;
    ++(at_once ? at_once_count : later_count);
  }
  CHECK_FALSE(done.exchange(true));
  mover.join();
  CHECK(wrong == 0);
  CHECK(at_once_count > 0);
  CHECK(later_count > 0);
}

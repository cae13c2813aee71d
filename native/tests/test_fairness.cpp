// Overload: a client that keeps all its slots full does not starve another one.
#include "engine/fair_queue.h"
#include "engine_fixture.h"

using namespace engram_test;

TEST_CASE("owners are served in turn") {
  engram::FairQueue<int> queue;
  CHECK(queue.empty());
  for (int item = 0; item < 4; ++item) queue.push(1, 10 + item);
  queue.push(2, 20);
  queue.push(3, 30);
  queue.push(2, 21);
  std::vector<int> order;
  while (!queue.empty()) {
    const int first = queue.front();
    CHECK(queue.front() == first);
    order.push_back(first);
    queue.pop();
    if (first == 20) queue.push(3, 31);
  }
  CHECK(order == std::vector<int>{10, 20, 30, 11, 21, 31, 12, 13});
}

namespace {

// Rows that the flooding client gets while the other one gets `wanted` batches of its own, one at a time.
std::uint64_t rows_of_flood(engram_engine* engine, std::uint32_t handle, std::uint32_t flood_rows,
                            std::uint32_t victim_rows, int wanted, std::uint64_t table_rows) {
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> flooded{0};
  std::atomic<bool> failed{false};
  BareClient flooder(engine);
  BareClient victim(engine);
  const std::uint32_t slots = flooder.welcome.geometry.slot_count;
  const auto ids_of = [&](std::uint64_t start, std::uint32_t count) {
    std::vector<std::int64_t> ids(count);
    for (std::uint32_t i = 0; i < count; ++i) ids[i] = static_cast<std::int64_t>((start + i * 15) % table_rows);
    return ids;
  };
  std::thread flood([&] {
    std::uint64_t turn = 0;
    const auto send = [&](std::uint32_t slot) {
      flooder.prepare(slot, handle, ids_of(turn++ * 977, flood_rows), std::uint64_t{slot} * flood_rows * 8,
                      std::uint64_t{slot} * (192 << 10));
      flooder.submit_only(slot);
    };
    for (std::uint32_t slot = 0; slot < slots; ++slot) send(slot);
    while (!stop.load()) {
      for (std::uint32_t slot = 0; slot < slots; ++slot) {
        const std::uint32_t status = std::atomic_ref(flooder.slot(slot).reply.completion).load();
        if (status == ENGRAM_STATUS_EMPTY) continue;
        if (status != ENGRAM_STATUS_OK) failed = true;
        flooded += flood_rows;
        send(slot);
      }
      sched_yield();
    }
  });
  while (flooded.load() == 0 && !failed.load()) sched_yield();
  const std::uint64_t before = flooded.load();
  for (int batch = 0; batch < wanted; ++batch) {
    victim.prepare(0, handle, ids_of(static_cast<std::uint64_t>(batch) * 331, victim_rows), 0, 0);
    victim.submit_only(0);
    if (victim.wait(0, 60) != ENGRAM_STATUS_OK) failed = true;
  }
  const std::uint64_t during = flooded.load() - before;
  stop = true;
  flood.join();
  CHECK_FALSE(failed.load());
  return during;
}

}  // namespace

TEST_CASE("a flood of one client does not starve another") {
  const TableFile table(30'000);
  for (const std::uint32_t reader : {ENGRAM_READER_AUTO, ENGRAM_READER_PREAD}) {
    engram_engine_options options = small_options(0);
    options.in_flight_cap = 8;
    options.reader = reader;
    const TestEngine engine({&table}, options);
    struct Case {
      std::uint32_t flood_rows, victim_rows;
      int batches;
    };
    for (const Case& one : {Case{200, 200, 20}, Case{200, 600, 8}, Case{600, 600, 8}, Case{600, 100, 20}}) {
      const std::uint64_t flooded = rows_of_flood(engine.get(), engine.handles[0], one.flood_rows, one.victim_rows,
                                                  one.batches, table.format().rows);
      const std::uint64_t own = std::uint64_t{one.victim_rows} * static_cast<std::uint64_t>(one.batches);
      MESSAGE("flood of ", one.flood_rows, "-row batches beside ", one.victim_rows, "-row ones: ", flooded,
              " rows while the other got ", own);
      // Half each would be fair; one batch at a time leaves gaps, and large ones give way to small ones.
      CHECK(flooded < own * 16);
    }
  }
}

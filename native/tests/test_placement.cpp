// Budgets that change and layers that come and go while clients fetch.
#include <sys/stat.h>

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
    CHECK(counters.used_bytes <= budget + (budget >= all ? all / 100 : 0));
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
  // Nearly all: a row whose two index buckets are full takes another's place, which depends on the order of arrival.
  REQUIRE(hot.size() >= 790);
  REQUIRE(hot.size() <= 800);
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
  CHECK(other.counters().dram_hits >= hot.size() - 10);
  CHECK(other.counters().nvme_reads <= other.counters().dram_misses);  // two rows may share a page
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
    REQUIRE(engram_engine_add_layers(engine.get(), &options, 1, engine.handles.data(), 1, &handle, error,
                                     sizeof error) == 0);
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
    CHECK(engine_counters(engine).used_bytes <= budget + 16'384);
  }
}

namespace {

// A table of one layer that an engine holds resident, in the given layout.
engram_layer_options resident_layer(const TableFile& table, const int* file, std::uint32_t row_layout,
                                    const int* kept = nullptr) {
  engram_layer_options options = table.layer_options(file);
  options.policy.tier = ENGRAM_POLICY_RESIDENT;
  options.policy.row_layout = row_layout;
  options.kept_memory = kept;
  return options;
}

struct ResidentEngine {
  ResidentEngine(const TableFile& table, std::uint32_t row_layout, const int* kept = nullptr,
                 std::uint64_t dram_bytes = 64 << 20) {
    char error[256] = "";
    const engram_engine_options options = small_options(dram_bytes);
    engine = engram_engine_create(&options, error, sizeof error);
    REQUIRE(engine != nullptr);
    const int file = table.descriptor();
    const engram_layer_options layer = resident_layer(table, &file, row_layout, kept);
    REQUIRE(engram_engine_add_layers(engine, &layer, 1, nullptr, 0, &handle, error, sizeof error) == 0);
    REQUIRE(engram_engine_start(engine, error, sizeof error) == 0);
    REQUIRE(eventually([&] { return counters().tier == ENGRAM_TIER_RESIDENT; }));
  }
  ~ResidentEngine() { engram_engine_destroy(engine); }

  engram_layer_counters counters() const {
    engram_layer_counters counters{};
    engram_engine_layer_counters(engine, &counters, 1);
    return counters;
  }
  // The memory's descriptor, to be closed.
  int memory(engram_resident_memory* memory) const {
    char error[256] = "";
    const int status = engram_engine_map_layer(engine, handle, memory, error, sizeof error);
    INFO(error);
    REQUIRE(status == 0);
    return memory->descriptor;
  }

  engram_engine* engine = nullptr;
  std::uint32_t handle = 0;
};

}  // namespace

TEST_CASE(
    "resident rows are exact in either layout, in replies of either layout and in the memory that is handed out") {
  const TableFile table(20'001);
  for (const std::uint32_t row_layout : {ENGRAM_LAYOUT_PACKED, ENGRAM_LAYOUT_SPLIT}) {
    const ResidentEngine engine(table, row_layout);
    BareClient client(engine.engine);
    std::mt19937_64 random(3);
    std::vector<std::int64_t> ids(3000);
    for (auto& id : ids) id = static_cast<std::int64_t>(random() % 20'002) - 1;
    REQUIRE(client.fetch(engine.handle, ids) == ENGRAM_STATUS_OK);
    CHECK(reply_is(table, client.reply(0), ids));

    engram_resident_memory memory{};
    const engram::UniqueFd file(engine.memory(&memory));
    const auto mapping = engram::Mapping::map(file.get(), memory.bytes, PROT_READ, MAP_SHARED);
    REQUIRE(mapping);
    CHECK(memory.row_layout == row_layout);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(mapping.data());
    std::uint64_t wrong = 0;
    for (std::int64_t row = 0; row < 20'001; row += 7) {
      const std::vector<std::uint8_t> expected = table.row(row);
      const auto number = static_cast<std::uint64_t>(row);
      if (row_layout == ENGRAM_LAYOUT_PACKED) {
        wrong += std::memcmp(bytes + number * 264, expected.data(), 264) != 0;
      } else {
        wrong += std::memcmp(bytes + number * 256, expected.data(), 256) != 0;
        wrong += std::memcmp(bytes + memory.scales_offset + number * 8, expected.data() + 256, 8) != 0;
      }
    }
    CHECK(wrong == 0);
    // Whoever has the descriptor can only read.
    CHECK(mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0) == MAP_FAILED);
    CHECK(pwrite(file.get(), "x", 1, 0) == -1);
    CHECK(ftruncate(file.get(), 4096) == -1);
    CHECK(fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == -1);
  }
}

TEST_CASE("resident rows are taken over from an earlier engine without a read") {
  const TableFile table(20'001);
  for (const std::uint32_t row_layout : {ENGRAM_LAYOUT_PACKED, ENGRAM_LAYOUT_SPLIT}) {
    engram_resident_memory memory{};
    engram::UniqueFd kept;
    {
      const ResidentEngine first(table, row_layout);
      kept = engram::UniqueFd(first.memory(&memory));
    }
    const int kept_file = kept.get();
    const ResidentEngine second(table, row_layout, &kept_file);
    CHECK(second.counters().background_reads == 0);
    BareClient client(second.engine);
    REQUIRE(client.fetch(second.handle, first_rows(3000)) == ENGRAM_STATUS_OK);
    CHECK(reply_is(table, client.reply(0), first_rows(3000)));
    CHECK(second.counters().nvme_reads == 0);

    // Another layout, and another table of the same size, are read from the drive.
    const ResidentEngine other_layout(table, 1 - row_layout, &kept_file);
    CHECK(other_layout.counters().background_reads > 0);
    const TableFile other(20'001, 256, 8, 2);
    const ResidentEngine other_table(other, row_layout, &kept_file);
    CHECK(other_table.counters().background_reads > 0);
    BareClient other_client(other_table.engine);
    REQUIRE(other_client.fetch(other_table.handle, first_rows(100)) == ENGRAM_STATUS_OK);
    CHECK(reply_is(other, other_client.reply(0), first_rows(100)));
  }
}

TEST_CASE("kept memory whose bytes have changed is not served") {
  const TableFile table(3000);
  engram_resident_memory memory{};
  engram::UniqueFd kept;
  {
    const ResidentEngine first(table, ENGRAM_LAYOUT_PACKED);
    kept = engram::UniqueFd(first.memory(&memory));
  }
  // A copy with one bit of row 100 flipped, sealed as the original is; and one that is not sealed.
  struct stat status {};
  REQUIRE(fstat(kept.get(), &status) == 0);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(status.st_size));
  REQUIRE(pread(kept.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  bytes[100 * 264 + 5] ^= 1;
  for (const bool sealed : {true, false}) {
    const engram::UniqueFd copy(memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(write(copy.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    if (sealed) REQUIRE(fcntl(copy.get(), F_ADD_SEALS, fcntl(kept.get(), F_GET_SEALS)) == 0);
    const int file = copy.get();
    const ResidentEngine second(table, ENGRAM_LAYOUT_PACKED, &file);
    BareClient client(second.engine);
    REQUIRE(client.fetch(second.handle, first_rows(3000)) == ENGRAM_STATUS_OK);
    CHECK(reply_is(table, client.reply(0), first_rows(3000)));
    CHECK(second.counters().nvme_reads == (sealed ? 1 : 0));  // the damaged page alone
    CHECK((second.counters().background_reads == 0) == sealed);
  }
}

TEST_CASE("a layer that clients have mapped stays resident, and counts when it is replaced") {
  const TableFile table(3000);
  const TableFile next(3000);
  const std::uint64_t all = 3000 * 264;
  for (const bool both_fit : {false, true}) {
    const ResidentEngine engine(table, ENGRAM_LAYOUT_PACKED, nullptr, both_fit ? 2 * all : all + all / 2);
    char error[256] = "";
    engram_layer_policy cached{};
    cached.tier = ENGRAM_POLICY_CACHED;
    engram_resident_memory memory{};
    const engram::UniqueFd file_of_map(engine.memory(&memory));
    REQUIRE(engram_engine_set_policy(engine.engine, engine.handle, &cached) == 0);
    CHECK(engram_engine_place(engine.engine, 4 * all, error, sizeof error) == -1);
    CHECK(std::string(error).find("mapped by 1 client") != std::string::npos);
    CHECK(engine.counters().tier == ENGRAM_TIER_RESIDENT);

    const int file = next.descriptor();
    const engram_layer_options options = resident_layer(next, &file, ENGRAM_LAYOUT_PACKED);
    std::uint32_t handle = 0;
    const auto replace = [&] {
      return engram_engine_add_layers(engine.engine, &options, 1, &engine.handle, 1, &handle, error, sizeof error);
    };
    if (!both_fit) {
      CHECK(replace() == -1);
      CHECK(std::string(error).find("clients have mapped") != std::string::npos);
      REQUIRE(engram_engine_unmap_layer(engine.engine, engine.handle) == 0);
      CHECK(engram_engine_unmap_layer(engine.engine, engine.handle) == ENGRAM_STATUS_BAD_REQUEST);
    }
    REQUIRE(replace() == 0);
    CHECK(handle == engine.handle + 1);  // a refusal uses no handle up
  }
}

TEST_CASE("a layer that is mapped has its place, however placements and maps meet") {
  const TableFile table(3000);
  const std::uint64_t all = 3000 * 264;
  const TestEngine engine({&table}, small_options(2 * all));
  std::atomic<bool> stop{false};
  std::thread placer([&] {
    char error[512] = "";
    for (int round = 0; !stop.load(); ++round) {
      engram_engine_place(engine.get(), round % 2 == 0 ? 0 : 2 * all, error, sizeof error);
      if (round % 2 == 0) continue;
      // Resident for a moment, so that there is something to map.
      while (!stop.load() && engine.counters().tier == ENGRAM_TIER_LOADING) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  std::uint64_t maps = 0;
  std::uint64_t unplaced = 0;
  const bool enough = eventually([&] {
    char error[512] = "";
    engram_resident_memory memory{};
    if (engram_engine_map_layer(engine.get(), engine.handles[0], &memory, error, sizeof error) == 0) {
      ++maps;
      close(memory.descriptor);
      unplaced += engram_engine_place(engine.get(), 0, error, sizeof error) == 0;
      unplaced += engine.counters().tier == ENGRAM_TIER_CACHED;
      CHECK(engram_engine_unmap_layer(engine.get(), engine.handles[0]) == 0);
    }
    return maps >= 5;
  });
  stop.store(true);
  placer.join();
  CHECK(enough);
  CHECK(unplaced == 0);
}

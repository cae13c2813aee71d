// Workers that sample while the curve is read and recordings come and go. Made for TSAN.
#include <algorithm>
#include <random>

#include "cache/row_cache.h"
#include "engine/layer.h"
#include "engine/row_sampler.h"
#include "engine_fixture.h"

using namespace engram_test;

TEST_CASE("workers sample while the curve is read and recordings come and go") {
  constexpr std::int64_t kRows = 6000;
  constexpr std::uint32_t kWorkers = 2;
  constexpr std::uint32_t kHandle = 3;
  const TableFile table(kRows);
  const int file = table.descriptor();
  std::string error;
  const auto layer = engram::Layer::open(table.layer_options(&file), kHandle, kWorkers, error);
  REQUIRE(layer != nullptr);
  engram::RowSampler sampler(kWorkers);
  std::atomic<std::uint64_t> lookups{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&, worker] {
      std::mt19937_64 random(worker + 1);
      std::vector<std::int64_t> ids(50);
      while (!stop.load()) {
        std::uint64_t zeros = 0;
        for (auto& id : ids) {
          id = static_cast<std::int64_t>(random() % (kRows + 1)) - 1;
          zeros += id < 0 ? 1 : 0;
        }
        sampler.observe(worker, *layer, ids.data(), static_cast<std::uint32_t>(ids.size()), zeros);
        lookups.fetch_add(ids.size() - zeros);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
  }
  // The curve begins while workers run, as a daemon's does after its start.
  REQUIRE(sampler.start_curve({layer.get()}, 1000, error));
  threads.emplace_back([&] {
    engram_curve_point points[64];
    std::uint64_t before = 0;
    while (!stop.load()) {
      const std::uint64_t count = sampler.read_curve(points, 64);
      CHECK(count > 0);
      CHECK(points[0].lookups >= before);
      before = points[0].lookups;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  std::vector<std::uint64_t> keys(1 << 16);
  std::int64_t wrong = 0;
  for (int recording = 0; recording < 4; ++recording) {
    REQUIRE(sampler.start_recording(ENGRAM_SAMPLE_ALL, keys.size(), error));
    CHECK_FALSE(sampler.start_recording(ENGRAM_SAMPLE_ALL, keys.size(), error));
    engram_record_state state{};
    std::uint64_t taken = 0;
    for (int look = 0; look < 10; ++look) {
      const std::int64_t count = sampler.take_samples(0, keys.data(), keys.size(), &state);
      REQUIRE(count >= 0);
      taken += static_cast<std::uint64_t>(count);
      wrong += std::count_if(keys.begin(), keys.begin() + count, [](std::uint64_t key) {
        return key - engram::row_key(kHandle, 0) >= static_cast<std::uint64_t>(kRows);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    CHECK(taken > 0);
    CHECK(state.left == 0);
    sampler.stop_recording();
    CHECK(sampler.take_samples(0, keys.data(), keys.size(), &state) == -1);
  }
  CHECK(wrong == 0);
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  engram_curve_point points[64];
  REQUIRE(sampler.read_curve(points, 64) > 0);
  CHECK(points[0].lookups <= lookups.load());
  CHECK(points[0].sampled > 0);
  sampler.stop();
}

// Which rows live in DRAM: decided at start, and anew for a new budget or a new generation. Memory of an old placement
// is freed before new memory is taken, so the budget holds at every moment; rows are served from their files meanwhile.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "engine/engine.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint32_t kMaxWarmRows = 65'536;
constexpr std::uint32_t kPlaceTimeoutMs = 60'000;

}  // namespace

// Rows in DRAM, freed in the keeper thread whoever lets go of them last: unmapping gigabytes takes long.
template <typename Rows, typename... Arguments>
std::shared_ptr<Rows> Engine::make_dram(Arguments&&... arguments) {
  dram_objects_.fetch_add(1);
  return std::shared_ptr<Rows>(new Rows(std::forward<Arguments>(arguments)...), [this](Rows* rows) {
    shared_.state->bury([this, rows] {
      delete rows;
      dram_objects_.fetch_sub(1);
    });
  });
}

std::vector<Layer*> Engine::served_layers() const {
  std::vector<Layer*> served;
  for (const auto& layer : layers_) {
    if (!layer->retired()) served.push_back(layer.get());
  }
  return served;
}

void Engine::clear_placements() {
  loader_.reset();
  for (const auto& layer : layers_) layer->set_placement(std::make_shared<Placement>());
  caches_.clear();
}

bool Engine::make_resident(std::string& error) {
  std::vector<ResidentLoader::Work> work;
  for (Layer* layer : served_layers()) {
    auto placement = std::make_shared<Placement>();
    placement->resident = make_dram<ResidentRows>(layer->rows, layer->layout);
    if (!placement->resident->valid()) {
      error = "cannot map " + std::to_string(layer->bytes()) + " bytes of memory for layer " +
              std::to_string(layer->layer) + ": lower --dram below the size of the tables";
      return false;
    }
    work.push_back({layer, placement->resident});
    layer->set_placement(std::move(placement));
  }
  loader_ = std::make_unique<ResidentLoader>(std::move(work), shared_.events);
  if (started_) loader_->start();
  return true;
}

// A cache per row size, each with its share of the budget.
bool Engine::make_caches(std::uint64_t dram_bytes, std::uint64_t all_bytes, std::string& error) {
  std::map<std::uint32_t, std::uint64_t> bytes_of_size;
  for (const Layer* layer : served_layers()) bytes_of_size[layer->row_bytes] += layer->bytes();
  for (const auto& [row_bytes, bytes] : bytes_of_size) {
    RowCache::Options options;
    options.row_bytes = row_bytes;
    options.readers = options_.workers;
    options.budget_bytes = static_cast<std::uint64_t>(
        static_cast<long double>(dram_bytes) * static_cast<long double>(bytes) / static_cast<long double>(all_bytes));
    std::shared_ptr<RowCache> cache = make_dram<RowCache>(options);
    if (!cache->valid()) {
      error = "cannot map " + std::to_string(options.budget_bytes) + " bytes of memory for rows of " +
              std::to_string(row_bytes) + " bytes: lower --dram";
      return false;
    }
    if (cache->capacity() == 0) cache = nullptr;
    caches_[row_bytes] = cache;
  }
  return true;
}

bool Engine::place_locked(std::uint64_t dram_bytes, std::string& error) {
  std::uint64_t all_bytes = 0;
  for (const Layer* layer : served_layers()) all_bytes += layer->bytes();
  const bool covers = dram_bytes >= all_bytes;
  const bool was_resident = loader_ != nullptr;
  const auto has_cache = [&](const Layer* layer) { return caches_.contains(layer->row_bytes); };
  const std::vector<Layer*> served = served_layers();
  const bool keep_caches = started_ && !covers && !was_resident && dram_bytes == dram_bytes_ &&
                           std::all_of(served.begin(), served.end(), has_cache);
  if (!keep_caches) {
    clear_placements();
    // Batches that run keep the old memory until they end.
    const std::int64_t deadline = monotonic_ns() + std::int64_t{kPlaceTimeoutMs} * 1'000'000;
    while (dram_objects_.load() > 0) {
      if (monotonic_ns() > deadline) {
        error = "running batches hold the old memory for more than " + std::to_string(kPlaceTimeoutMs / 1000) + " s";
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    dram_bytes_ = dram_bytes;
    if (covers) return make_resident(error);
    if (!make_caches(dram_bytes, all_bytes, error)) return false;
  }
  for (Layer* layer : served) {
    auto placement = std::make_shared<Placement>();
    placement->cache = caches_[layer->row_bytes];
    layer->set_placement(std::move(placement));
  }
  return true;
}

bool Engine::place(std::uint64_t dram_bytes, std::string& error) {
  const std::lock_guard lock(layers_mutex_);
  return place_locked(dram_bytes, error);
}

std::uint32_t Engine::retire_layer(std::uint32_t handle, std::uint32_t timeout_ms) {
  Layer* layer = shared_.layer(handle);
  if (layer == nullptr) return ENGRAM_STATUS_UNKNOWN_TABLE;
  layer->retire();
  const std::int64_t deadline = monotonic_ns() + std::int64_t{timeout_ms} * 1'000'000;
  while (layer->in_use()) {
    if (monotonic_ns() > deadline) return ENGRAM_STATUS_TIMEOUT;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::lock_guard lock(layers_mutex_);
  layer->set_placement(std::make_shared<Placement>());
  layer->close_files();
  return 0;
}

std::uint64_t Engine::hot_rows(std::uint32_t handle, std::uint64_t* cursor, std::uint64_t* rows,
                               std::uint64_t capacity) {
  const Layer* layer = shared_.layer(handle);
  if (layer == nullptr) return 0;
  const std::shared_ptr<RowCache> cache = layer->placement()->cache;
  return cache != nullptr ? cache->hot_rows(handle, cursor, rows, capacity) : 0;
}

std::uint32_t Engine::warm(std::uint32_t handle, const std::uint64_t* rows, std::uint32_t count,
                           std::uint32_t timeout_ms) {
  if (count > kMaxWarmRows) return ENGRAM_STATUS_BAD_REQUEST;
  const auto local = std::make_shared<LocalRequest>();
  local->warm = true;
  local->request.operation = ENGRAM_OPERATION_PREFETCH;
  local->request.handle = handle;
  local->request.row_count = count;
  local->request.id_bytes = sizeof(std::uint64_t);
  local->request.part_count = 1;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(rows);
  local->ids.assign(bytes, bytes + std::uint64_t{count} * sizeof(std::uint64_t));
  return run_local(local, timeout_ms);
}

}  // namespace engram

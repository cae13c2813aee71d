// Which rows live in DRAM: decided at start, and anew for a new budget, policy or generation. What stays as it was
// keeps its rows. Memory that is given up is freed before new memory is taken, so the budget holds at every moment;
// rows are served from their files meanwhile.
#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "engine/engine.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint32_t kMaxWarmRows = 65'536;
constexpr std::uint32_t kPlaceTimeoutMs = 60'000;
constexpr int kMapAttempts = 100;  // 20 ms or so

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

// Takes DRAM from whatever the plan does not keep as it is, and waits until that memory is free: batches that run keep
// theirs until they end.
bool Engine::free_all_but(const PlacementPlan& plan, std::string& error) {
  // A cache that only retired layers used holds nothing but their rows, and would have no room for their successors'.
  const auto is_used = [&](const std::shared_ptr<RowCache>& cache) {
    return cache == nullptr || std::any_of(layers_.begin(), layers_.end(),
                                           [&](const auto& layer) { return layer->placement()->cache == cache; });
  };
  std::erase_if(caches_, [&](const auto& entry) {
    const auto wanted = plan.cache_bytes.find(entry.first);
    return wanted == plan.cache_bytes.end() || wanted->second != entry.second.budget_bytes ||
           !is_used(entry.second.cache);
  });
  std::uint32_t kept = 0;
  for (const auto& [key, placed] : caches_) kept += placed.cache != nullptr ? 1 : 0;
  for (const auto& layer : layers_) {
    const std::shared_ptr<const Placement> now = layer->placement();
    bool stays = false;
    if (now->resident != nullptr) {
      stays = std::find(plan.resident.begin(), plan.resident.end(), layer.get()) != plan.resident.end() &&
              now->resident->row_layout() == layer->resident_layout();
      kept += stays ? 1 : 0;
    } else if (now->cache != nullptr) {
      const auto kept_cache = caches_.find(cache_key_of(*layer));
      stays = std::find(plan.cached.begin(), plan.cached.end(), layer.get()) != plan.cached.end() &&
              kept_cache != caches_.end() && kept_cache->second.cache == now->cache;
    }
    if (!stays) layer->set_placement(std::make_shared<Placement>());
  }
  const std::int64_t deadline = monotonic_ns() + std::int64_t{kPlaceTimeoutMs} * 1'000'000;
  while (dram_objects_.load() > kept) {
    if (monotonic_ns() > deadline) {
      error = "running batches hold the old memory for more than " + std::to_string(kPlaceTimeoutMs / 1000) + " s";
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

bool Engine::make_resident(const PlacementPlan& plan, std::string& error) {
  for (Layer* layer : plan.resident) {
    if (layer->placement()->resident != nullptr) continue;
    auto placement = std::make_shared<Placement>();
    placement->resident =
        make_dram<ResidentRows>(layer->format, layer->resident_layout(), std::exchange(layer->kept, {}));
    if (!placement->resident->valid()) {
      error = "cannot get " + std::to_string(layer->bytes()) + " bytes of memory for layer " +
              std::to_string(layer->layer) + " (" + placement->resident->error() +
              "): lower --dram below the size of the tables, or let it be cached";
      return false;
    }
    layer->set_placement(std::move(placement));
  }
  return true;
}

bool Engine::make_caches(const PlacementPlan& plan, std::string& error) {
  for (const auto& [key, bytes] : plan.cache_bytes) {
    if (caches_.contains(key)) continue;
    RowCache::Options options;
    options.row_bytes = key.row_bytes;
    options.readers = options_.workers;
    options.budget_bytes = bytes;
    std::shared_ptr<RowCache> cache = make_dram<RowCache>(options);
    if (!cache->valid()) {
      error = "cannot map " + std::to_string(bytes) + " bytes of memory for rows of " + std::to_string(key.row_bytes) +
              " bytes: lower --dram";
      return false;
    }
    if (cache->capacity() == 0) cache = nullptr;
    caches_[key] = {bytes, std::move(cache)};
  }
  for (Layer* layer : plan.cached) {
    auto placement = std::make_shared<Placement>();
    placement->cache = caches_[cache_key_of(*layer)].cache;
    layer->set_placement(std::move(placement));
  }
  return true;
}

// For what is resident and not all there: a loader that was stopped half way is followed by one that reads the rest.
void Engine::start_loader() {
  std::vector<ResidentLoader::Work> work;
  for (Layer* layer : served_layers()) {
    const std::shared_ptr<ResidentRows> resident = layer->placement()->resident;
    if (resident != nullptr && !resident->finished()) work.push_back({layer, resident});
  }
  loader_ = std::make_unique<ResidentLoader>(std::move(work), shared_.events);
  if (started_) loader_->start();
}

bool Engine::place_locked(std::uint64_t dram_bytes, std::string& error) {
  PlacementPlan plan;
  if (!plan_placement(served_layers(), dram_bytes, held_bytes(), plan, error)) return false;
  loader_.reset();
  bool placed = free_all_but(plan, error);
  if (placed) {
    dram_bytes_ = dram_bytes;
    placed = make_resident(plan, error) && make_caches(plan, error);
  }
  for (const auto& layer : layers_) layer->kept.reset();  // what was not taken over
  start_loader();
  return placed;
}

bool Engine::check_place(std::uint64_t dram_bytes, std::string& error) {
  const std::lock_guard lock(layers_mutex_);
  PlacementPlan plan;
  return plan_placement(served_layers(), dram_bytes, held_bytes(), plan, error);
}

// Whether `added` can take the place of the layers whose handles are `replaced`, under the budget in force.
bool Engine::check_replacement(const std::vector<std::unique_ptr<Layer>>& added,
                               std::span<const std::uint32_t> replaced, std::string& error) const {
  std::vector<Layer*> layers;
  std::uint64_t held = held_bytes();
  std::vector<const Layer*> mapped;  // of those that go
  for (Layer* layer : served_layers()) {
    if (std::find(replaced.begin(), replaced.end(), layer->handle) == replaced.end()) {
      layers.push_back(layer);
    } else if (layer->maps != 0) {
      held += layer->bytes();
      mapped.push_back(layer);
    }
  }
  for (const auto& layer : added) layers.push_back(layer.get());
  const std::uint64_t dram_bytes = dram_bytes_.load();
  PlacementPlan plan;
  if (!plan_placement(layers, dram_bytes, held, plan, error)) return false;
  for (const Layer* old : mapped) {
    const auto replaces = [&](const Layer* layer) { return layer->layer == old->layer && layer->handle > old->handle; };
    if (std::any_of(plan.resident.begin(), plan.resident.end(), replaces)) continue;
    error = "layer " + std::to_string(old->layer) + " is mapped by " + std::to_string(old->maps.load()) +
            " client(s), and the DRAM budget of " + std::to_string(dram_bytes) +
            " does not cover both generations: close those maps, or raise dram";
    return false;
  }
  return true;
}

// Of generations that are gone but for clients that have them mapped.
std::uint64_t Engine::held_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& layer : layers_) bytes += layer->retired() && layer->maps != 0 ? layer->bytes() : 0;
  return bytes;
}

bool Engine::map_layer(std::uint32_t handle, engram_resident_memory* memory, std::string& error) {
  Layer* layer = shared_.layer(handle);
  if (layer == nullptr) {
    error = "no layer has the handle " + std::to_string(handle);
    return false;
  }
  // Against a placement that has planned without this map. Whoever reads counters is soon done; but a placement waits
  // for batches, and whoever asks must not.
  std::unique_lock lock(layers_mutex_, std::try_to_lock);
  for (int attempt = 0; !lock && attempt < kMapAttempts; ++attempt) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    static_cast<void>(lock.try_lock());
  }
  if (!lock) {
    error = "layers are just being placed: try again";
    return false;
  }
  if (layer->retired()) {
    error = "this generation is no longer served";
    return false;
  }
  const std::shared_ptr<ResidentRows> resident = layer->placement()->resident;
  if (resident == nullptr) {
    error = "it is not resident, but cached: give the layer the tier \"resident\", or raise dram";
    return false;
  }
  if (!resident->complete()) {
    error = resident->finished() ? "it has damaged pages, which are left to the drive: repair the table and reload it"
                                 : "it is still being read: " + std::to_string(resident->used_bytes()) + " of " +
                                       std::to_string(layer->bytes()) + " bytes are there";
    return false;
  }
  *memory = resident->memory();
  memory->descriptor = fcntl(memory->descriptor, F_DUPFD_CLOEXEC, 0);
  if (memory->descriptor < 0) {
    error = std::strerror(errno);
    return false;
  }
  layer->maps.fetch_add(1);
  return true;
}

std::uint32_t Engine::unmap_layer(std::uint32_t handle) {
  Layer* layer = shared_.layer(handle);
  if (layer == nullptr) return ENGRAM_STATUS_UNKNOWN_TABLE;
  std::uint32_t maps = layer->maps.load();
  do {
    if (maps == 0) return ENGRAM_STATUS_BAD_REQUEST;
  } while (!layer->maps.compare_exchange_weak(maps, maps - 1));
  return 0;
}

std::uint32_t Engine::set_policy(std::uint32_t handle, const engram_layer_policy& policy) {
  Layer* layer = shared_.layer(handle);
  if (layer == nullptr) return ENGRAM_STATUS_UNKNOWN_TABLE;
  if (!Layer::is_valid(policy)) return ENGRAM_STATUS_BAD_REQUEST;
  const std::lock_guard lock(layers_mutex_);
  layer->policy = policy;
  return 0;
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

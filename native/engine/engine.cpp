#include "engine/engine.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "io/fault_reader.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint64_t kMinArenaBytes = 64 << 10;
constexpr std::uint64_t kMaxArenaBytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kMinIdsBytes = 64 << 10;
constexpr std::uint64_t kMaxIdsBytes = 16 << 20;
constexpr std::uint32_t kDefaultInFlight = 128;  // the knee of common drives; more brings queueing only
constexpr std::uint32_t kMaxInFlight = 4096;
constexpr std::uint32_t kDefaultSpinUs = 30;
constexpr std::uint32_t kDefaultSlots = 64;
constexpr std::uint32_t kStreamSlots = 32;  // of a session that asks for any
constexpr std::uint32_t kDefaultPollPermille = 100;

}  // namespace

std::unique_ptr<Engine> Engine::create(const engram_engine_options& given, std::string& error) {
  engram_engine_options options = given;
  if (options.slot_count == 0) options.slot_count = kDefaultSlots;
  if (options.in_flight_cap == 0) options.in_flight_cap = kDefaultInFlight;
  if (options.spin_us == 0) options.spin_us = kDefaultSpinUs;
  if (options.poll_permille == 0) options.poll_permille = kDefaultPollPermille;
  options.poll_permille = std::min(options.poll_permille, 1000u);
  if (options.workers == 0) options.workers = std::clamp(std::thread::hardware_concurrency() / 4, 1u, 8u);
  if (!std::has_single_bit(options.slot_count) || options.slot_count > ENGRAM_MAX_SLOTS) {
    error = "slot_count is " + std::to_string(options.slot_count) + ", it must be a power of two up to " +
            std::to_string(ENGRAM_MAX_SLOTS);
    return nullptr;
  }
  if (options.workers > ENGRAM_MAX_WORKERS) {
    error = "workers is " + std::to_string(options.workers) + ", the limit is " + std::to_string(ENGRAM_MAX_WORKERS);
    return nullptr;
  }
  if (options.in_flight_cap > kMaxInFlight) {
    error =
        "in_flight_cap is " + std::to_string(options.in_flight_cap) + ", the limit is " + std::to_string(kMaxInFlight);
    return nullptr;
  }
  if (options.arena_bytes < kMinArenaBytes || options.arena_bytes > kMaxArenaBytes) {
    error = "the arena is " + std::to_string(options.arena_bytes) + " bytes, it must be " +
            std::to_string(kMinArenaBytes) + " to " + std::to_string(kMaxArenaBytes);
    return nullptr;
  }
  if (!prepare_faults(error)) return nullptr;
  std::unique_ptr<Engine> engine(new Engine(options));
  if (engine->shared_.events.descriptor() < 0 || engine->shared_.completions.descriptor() < 0) {
    error = std::string("eventfd: ") + std::strerror(errno);
    return nullptr;
  }
  engine->shared_.sampler = std::make_unique<RowSampler>(engine->counter_sets());
  engine->shared_.state = StatePage::create(error);
  if (engine->shared_.state == nullptr) return nullptr;
  return engine;
}

Engine::~Engine() {
  shared_.stopping.store(true, std::memory_order_seq_cst);
  if (shared_.state != nullptr) shared_.state->set_phase(ENGRAM_PHASE_STOPPING);
  loader_.reset();
  workers_.clear();
  sessions_.clear();
  layers_.clear();
  caches_.clear();
  shared_.state.reset();  // after the workers: it frees the sessions they hand over
}

// A layer can be asked for from the store of its address on, by whoever guesses its handle, and is never taken back: so
// everything that can be refused is refused before.
bool Engine::add_layers(std::span<const engram_layer_options> options, std::span<const std::uint32_t> replaced,
                        std::uint32_t* handles, std::string& error) {
  const std::lock_guard lock(layers_mutex_);
  if (options.size() > EngineShared::kMaxHandles - layers_.size()) {
    error = std::to_string(EngineShared::kMaxHandles) + " layers can be opened from start to end, and " +
            std::to_string(layers_.size()) + " have been: restart the daemon";
    return false;
  }
  std::vector<std::unique_ptr<Layer>> added;
  for (const engram_layer_options& one : options) {
    if (started_ && engram_page_bytes(one.row_bytes) > page_bytes_) {
      error = "layer " + std::to_string(one.layer) + ": pages of " + std::to_string(engram_page_bytes(one.row_bytes)) +
              " bytes, the buffers were made for " + std::to_string(page_bytes_) + ": restart the daemon";
      return false;
    }
    const auto handle = static_cast<std::uint32_t>(layers_.size() + added.size() + 1);
    added.push_back(Layer::open(one, handle, counter_sets(), error));
    if (added.back() == nullptr) return false;
  }
  if (started_ && !check_replacement(added, replaced, error)) return false;
  layers_.reserve(layers_.size() + added.size());
  for (std::unique_ptr<Layer>& layer : added) {
    *handles++ = layer->handle;
    shared_.layers[layer->handle - 1].store(layer.get(), std::memory_order_release);
    layers_.push_back(std::move(layer));
  }
  return true;
}

bool Engine::start(std::string& error) {
  const std::lock_guard lock(layers_mutex_);
  if (layers_.empty()) {
    error = "no table to serve";
    return false;
  }
  if (!place_locked(options_.dram_bytes, error)) return false;
  std::uint32_t smallest_row = ENGRAM_MAX_ROW_BYTES;
  for (const auto& layer : layers_) {
    smallest_row = std::min(smallest_row, layer->row_bytes);
    page_bytes_ = std::max(page_bytes_, layer->layout.page_bytes);
  }
  ids_bytes_ = std::clamp(options_.arena_bytes / smallest_row * sizeof(std::int64_t), kMinIdsBytes, kMaxIdsBytes);
  for (std::uint32_t index = 0; index < options_.workers; ++index) {
    WorkerOptions worker;
    worker.index = index;
    worker.in_flight_cap = std::max(8u, options_.in_flight_cap / options_.workers);
    worker.spin_us = options_.spin_us;
    worker.poll_permille = options_.poll_permille;
    if (options_.prefetch_rows != 0) worker.prefetch_rows = options_.prefetch_rows;
    worker.reader = options_.reader;
    worker.page_bytes = page_bytes_;
    workers_.push_back(std::make_unique<Worker>(shared_, worker));
    if (!workers_.back()->start(error)) {
      workers_.pop_back();
      return false;
    }
  }
  for (const auto& worker : workers_) shared_.workers.push_back(worker.get());
  WorkerOptions at_once;
  at_once.index = options_.workers;
  at_once_ = std::make_unique<Worker>(shared_, at_once);
  if (loader_ != nullptr) loader_->start();
  started_ = true;
  return true;
}

std::uint32_t Engine::open_session(std::int64_t pid, std::uint32_t uid, std::uint64_t arena_bytes, std::uint32_t flags,
                                   engram_welcome* welcome, engram_session_descriptors* descriptors,
                                   std::string& error) {
  RingSession::Options options;
  options.pid = pid;
  options.uid = uid;
  // A client may have less than the configured arena, not more.
  options.arena_bytes =
      arena_bytes == 0 ? options_.arena_bytes : std::clamp(arena_bytes, kMinArenaBytes, options_.arena_bytes);
  options.ids_bytes = ids_bytes_;
  options.slot_count = options_.slot_count;
  // Together they fit a slot's number.
  if ((flags & ENGRAM_HELLO_STREAM_SLOTS) != 0) {
    options.stream_slot_count = std::min(kStreamSlots, ENGRAM_MAX_SLOTS - options.slot_count);
  }
  options.writable_arena = (flags & ENGRAM_HELLO_WRITABLE_ARENA) != 0;
  options.memory = &session_memory_;
  const std::uint64_t bytes = options.arena_bytes + options.ids_bytes;
  if (session_memory_.sessions.load() >= options_.session_limit) {
    error = "the limit of " + std::to_string(options_.session_limit) +
            " sessions is reached: close clients, or raise --sessions";
    return ENGRAM_STATUS_BUSY;
  }
  if (session_memory_.bytes.load() + bytes > options_.arena_limit_bytes) {
    error = "arenas take " + std::to_string(session_memory_.bytes.load()) + " of " +
            std::to_string(options_.arena_limit_bytes) + " bytes, one more needs " + std::to_string(bytes) +
            ": close clients, lower --arena or raise --arena-limit";
    return ENGRAM_STATUS_BUSY;
  }
  {
    // The least busy worker by number of sessions.
    const std::lock_guard lock(sessions_mutex_);
    std::vector<std::uint32_t> load(workers_.size());
    for (const auto& [id, session] : sessions_) ++load[session.worker];
    options.worker = static_cast<std::uint32_t>(std::min_element(load.begin(), load.end()) - load.begin());
    options.id = next_session_++;
  }
  std::unique_ptr<RingSession> session = RingSession::create(options, error);
  if (session == nullptr) return ENGRAM_STATUS_BUSY;
  descriptors->ring = fcntl(session->ring_descriptor(), F_DUPFD_CLOEXEC, 0);
  descriptors->arena = fcntl(session->arena_descriptor(), F_DUPFD_CLOEXEC, 0);
  descriptors->doorbell = fcntl(session->doorbell(), F_DUPFD_CLOEXEC, 0);
  if (descriptors->ring < 0 || descriptors->arena < 0 || descriptors->doorbell < 0) {
    error = std::string("no descriptor for a session: ") + std::strerror(errno) + ": raise LimitNOFILE";
    for (const int descriptor : {descriptors->ring, descriptors->arena, descriptors->doorbell}) {
      if (descriptor >= 0) ::close(descriptor);
    }
    return ENGRAM_STATUS_BUSY;
  }
  welcome->session = options.id;
  welcome->worker = options.worker;
  welcome->geometry = session->geometry();
  welcome->state_bytes = shared_.state->bytes();
  const std::lock_guard lock(sessions_mutex_);
  Session& entry = sessions_[options.id];
  entry.counters = session->counters;
  entry.worker = options.worker;
  entry.waiting = std::move(session);
  return 0;
}

std::uint32_t Engine::start_session(std::uint64_t id, std::string& error) {
  const std::lock_guard lock(sessions_mutex_);
  const auto entry = sessions_.find(id);
  if (entry == sessions_.end() || entry->second.waiting == nullptr) {
    error = "session " + std::to_string(id) + " is not waiting to be started";
    return ENGRAM_STATUS_BAD_REQUEST;
  }
  if (!entry->second.waiting->seal()) {
    error = "session " + std::to_string(id) + ": its ring cannot be sealed: " + std::strerror(errno);
    return ENGRAM_STATUS_BAD_REQUEST;
  }
  workers_[entry->second.worker]->add_session(std::move(entry->second.waiting));
  return 0;
}

void Engine::close_session(std::uint64_t id) {
  std::unique_ptr<RingSession> unused;
  const std::lock_guard lock(sessions_mutex_);
  const auto entry = sessions_.find(id);
  if (entry == sessions_.end()) return;
  unused = std::move(entry->second.waiting);
  if (unused == nullptr) {
    workers_[entry->second.worker]->close_session(id);
  } else {
    shared_.state->bury(std::move(unused));
  }
  sessions_.erase(entry);
}

std::uint64_t Engine::layer_counters(engram_layer_counters* counters, std::uint64_t capacity) {
  for (const auto& worker : workers_) worker->settle_counters();
  const std::lock_guard lock(layers_mutex_);
  std::uint64_t count = 0;
  for (const Layer* layer : served_layers()) {
    if (count++ >= capacity) continue;
    engram_layer_counters& out = counters[count - 1];
    out = {};
    out.handle = layer->handle;
    const auto placement = layer->placement();
    out.tier = placement->resident == nullptr    ? ENGRAM_TIER_CACHED
               : placement->resident->finished() ? ENGRAM_TIER_RESIDENT
                                                 : ENGRAM_TIER_LOADING;
    const auto cache = caches_.find(cache_key_of(*layer));
    out.dram_bytes = placement->resident != nullptr ? layer->bytes()
                     : cache != caches_.end()       ? cache->second.budget_bytes
                                                    : 0;
    out.maps = layer->maps.load();
    out.rows_total = layer->rows;
    out.background_reads = layer->background_reads.load(std::memory_order_relaxed);
    for (std::uint32_t worker = 0; worker < counter_sets(); ++worker) {
      const LayerCounters& part = layer->counters[worker];
      out.requests += part.requests.read();
      out.rows_zero += part.rows_zero.read();
      out.dram_hits += part.dram_hits.read();
      out.dram_misses += part.dram_misses.read();
      out.rows_failed += part.rows_failed.read();
      out.rows_unique += part.rows_unique.read();
      out.nvme_reads += part.nvme_reads.read();
      out.prefetch_reads += part.prefetch_reads.read();
      out.rereads += part.rereads.read();
      for (std::uint32_t status = 0; status < ENGRAM_STATUS_COUNT; ++status) {
        out.errors[status] += part.errors[status].read();
      }
    }
    // Derived, so that the sum holds in every snapshot.
    out.rows = out.rows_zero + out.dram_hits + out.dram_misses + out.rows_failed;
  }
  return count;
}

std::uint64_t Engine::session_counters(engram_session_counters* counters, std::uint64_t capacity) {
  const std::lock_guard lock(sessions_mutex_);
  const auto now = static_cast<std::uint64_t>(monotonic_ns());
  std::uint64_t count = 0;
  for (const auto& [id, session] : sessions_) {
    if (count < capacity) {
      engram_session_counters& out = counters[count];
      out.session = id;
      out.pid = session.counters->pid;
      out.uid = session.counters->uid;
      out.waiting = session.counters->in_flight.load(std::memory_order_relaxed);
      out.since_s = static_cast<double>(now - session.counters->since_ns) / 1e9;
      out.requests = session.counters->requests.read();
      out.rows = session.counters->rows.read();
    }
    ++count;
  }
  return count;
}

void Engine::read_counters(engram_engine_counters* counters) {
  engram_engine_counters& out = *counters;
  out = {};
  {
    const std::lock_guard lock(layers_mutex_);
    out.budget_bytes = dram_bytes_;
    for (const auto& [key, placed] : caches_) {
      if (placed.cache == nullptr) continue;
      const RowCache::Usage usage = placed.cache->usage();
      out.used_bytes += usage.used_bytes;
      out.metadata_bytes += usage.metadata_bytes;
      out.hugetlb_bytes += usage.hugetlb_bytes;
      out.rows_cached += usage.rows;
    }
    for (const auto& layer : layers_) {
      const auto placement = layer->placement();
      const ResidentRows* resident = placement->resident.get();
      if (resident == nullptr) continue;
      out.used_bytes += resident->used_bytes() + resident->metadata_bytes();
      out.metadata_bytes += resident->metadata_bytes();
      out.hugetlb_bytes += resident->hugetlb_bytes();
      out.rows_cached += resident->used_bytes() / layer->row_bytes;
    }
  }
  out.arena_count = session_memory_.sessions.load();
  out.arena_bytes = session_memory_.bytes.load();
  out.arena_limit_bytes = options_.arena_limit_bytes;
  out.workers = options_.workers;
  out.reader = ENGRAM_READER_PREAD;
  for (const auto& worker : workers_) {
    if (worker->reads_with_io_uring()) out.reader = ENGRAM_READER_IO_URING;
    out.in_flight += worker->reads_in_flight();
    out.in_flight_cap += std::max(8u, options_.in_flight_cap / options_.workers);
    out.prefetch_dropped_rows += worker->prefetch_dropped_rows();
    out.prefetch_queued_rows += worker->prefetch_queued_rows();
  }
  for (std::uint32_t size_class = 0; size_class < ENGRAM_LATENCY_CLASSES; ++size_class) {
    std::vector<std::uint64_t> buckets(LatencyHistogram::kBuckets);
    engram_latency& latency = out.latency[size_class];
    for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
      buckets[bucket] = latency_count(size_class, bucket);
      latency.count += buckets[bucket];
    }
    const auto percentile = [&](double share) {
      const auto rank = static_cast<std::uint64_t>(share * static_cast<double>(latency.count));
      std::uint64_t seen = 0;
      for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
        seen += buckets[bucket];
        if (seen > rank) return LatencyHistogram::middle(bucket) / 1000;
      }
      return 0.0;
    };
    latency.p50_us = percentile(0.50);
    latency.p99_us = percentile(0.99);
    latency.p999_us = percentile(0.999);
  }
}

std::uint64_t Engine::open_requests() const {
  std::uint64_t open = 0;
  for (const auto& worker : workers_) open += worker->open_requests();
  return open;
}

bool Engine::drain(std::uint32_t timeout_ms) {
  shared_.state->set_phase(ENGRAM_PHASE_STOPPING);
  shared_.stopping.store(true, std::memory_order_seq_cst);
  const std::int64_t deadline = monotonic_ns() + std::int64_t{timeout_ms} * 1'000'000;
  while (open_requests() > 0) {
    if (monotonic_ns() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace engram

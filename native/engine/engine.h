// The engine: layers, caches, workers and sessions under one roof. engine_abi.cpp puts the C ABI (engram/engine.h) over
// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "engine/placement_plan.h"
#include "engine/resident_loader.h"
#include "engine/worker.h"

namespace engram {

class Engine {
 public:
  static std::unique_ptr<Engine> create(const engram_engine_options& options, std::string& error);
  ~Engine();

  bool add_layers(std::span<const engram_layer_options> options, std::span<const std::uint32_t> replaced,
                  std::uint32_t* handles, std::string& error);
  bool start(std::string& error);

  // engine_place.cpp
  bool place(std::uint64_t dram_bytes, std::string& error);
  bool check_place(std::uint64_t dram_bytes, std::string& error);
  bool map_layer(std::uint32_t handle, engram_resident_memory* memory, std::string& error);
  std::uint32_t unmap_layer(std::uint32_t handle);
  std::uint32_t set_policy(std::uint32_t handle, const engram_layer_policy& policy);
  std::uint32_t retire_layer(std::uint32_t handle, std::uint32_t timeout_ms);
  std::uint64_t hot_rows(std::uint32_t handle, std::uint64_t* cursor, std::uint64_t* rows, std::uint64_t capacity);
  std::uint32_t warm(std::uint32_t handle, const std::uint64_t* rows, std::uint32_t count, std::uint32_t timeout_ms);

  std::uint32_t open_session(std::int64_t pid, std::uint32_t uid, std::uint64_t arena_bytes, std::uint32_t flags,
                             engram_welcome* welcome, engram_session_descriptors* descriptors, std::string& error);
  std::uint32_t start_session(std::uint64_t session, std::string& error);
  void close_session(std::uint64_t session);
  // engine_local.cpp
  std::uint32_t submit(const engram_request& request, const void* ids, std::uint64_t tag,
                       engram_completion* completion);
  bool next_completion(engram_completion* completion);

  std::uint64_t layer_counters(engram_layer_counters* counters, std::uint64_t capacity);
  std::uint64_t session_counters(engram_session_counters* counters, std::uint64_t capacity);
  void read_counters(engram_engine_counters* counters);
  // Waits for nothing, a placement that is under way included.
  std::uint64_t budget_bytes() const { return dram_bytes_.load(); }
  std::uint64_t latency_histogram(std::uint32_t latency_class, engram_latency_bucket* buckets, std::uint64_t capacity,
                                  std::uint64_t* sum_ns) const;  // engine_latency.cpp

  bool drain(std::uint32_t timeout_ms);
  EngineShared& shared() { return shared_; }

 private:
  struct Session {
    std::shared_ptr<SessionCounters> counters;
    std::uint32_t worker = 0;
    std::unique_ptr<RingSession> waiting;  // not mapped by the client yet
  };
  struct PlacedCache {
    std::uint64_t budget_bytes = 0;
    std::shared_ptr<RowCache> cache;  // null where the budget is too small for two rows
  };

  explicit Engine(const engram_engine_options& options) : options_(options) {}
  // With layers_mutex_ held:
  bool place_locked(std::uint64_t dram_bytes, std::string& error);
  bool free_all_but(const PlacementPlan& plan, std::string& error);
  bool make_resident(const PlacementPlan& plan, std::string& error);
  bool make_caches(const PlacementPlan& plan, std::string& error);
  void start_loader();
  std::uint64_t held_bytes() const;
  bool check_replacement(const std::vector<std::unique_ptr<Layer>>& added, std::span<const std::uint32_t> replaced,
                         std::string& error) const;
  std::vector<Layer*> served_layers() const;

  void start_local(const std::shared_ptr<LocalRequest>& local);
  std::uint32_t run_local(const std::shared_ptr<LocalRequest>& local, std::uint32_t timeout_ms);
  template <typename Rows, typename... Arguments>
  std::shared_ptr<Rows> make_dram(Arguments&&... arguments);
  std::uint64_t open_requests() const;
  std::uint32_t counter_sets() const { return options_.workers + 1; }  // the last is at_once_'s
  std::uint64_t latency_count(std::uint32_t latency_class, std::uint32_t bucket) const;

  engram_engine_options options_;
  EngineShared shared_;
  SessionMemory session_memory_;
  std::mutex layers_mutex_;
  std::vector<std::unique_ptr<Layer>> layers_;  // under layers_mutex_; shared_ points into it
  std::map<CacheKey, PlacedCache> caches_;      // under layers_mutex_
  std::unique_ptr<ResidentLoader> loader_;      // under layers_mutex_
  std::atomic<std::uint64_t> dram_bytes_{0};    // the budget in force; written under layers_mutex_
  std::atomic<std::uint32_t> dram_objects_{0};  // caches and resident layers whose memory is not freed yet
  bool started_ = false;
  std::uint64_t ids_bytes_ = 0;   // of a session's ids area
  std::uint32_t page_bytes_ = 0;  // of the workers' buffers
  std::mutex sessions_mutex_;
  std::map<std::uint64_t, Session> sessions_;  // under sessions_mutex_
  std::uint64_t next_session_ = 1;             // under sessions_mutex_
  std::atomic<std::uint32_t> next_local_worker_{0};
  std::mutex at_once_mutex_;
  std::unique_ptr<Worker> at_once_;  // never started: serves on its caller's thread, under at_once_mutex_
  // Last, so that they stop first: workers use everything above.
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace engram

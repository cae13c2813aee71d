// Samples the rows that clients ask for: for the engine's own miss curve, and for recordings.
//
// Workers put sampled keys into rings of their own, without a lock; a background thread empties them, feeds the
// imitated caches, and fills the recording. What a full ring cannot take is lost and counted. The order of keys of
// different workers is right to the thread's period, some tens of milliseconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache_simulation.h"
#include "engine/counters.h"
#include "engram/sampling.h"

namespace engram {

class Layer;

class RowSampler {
 public:
  explicit RowSampler(std::uint32_t workers);
  ~RowSampler() { stop(); }

  void stop();

  // A worker: whether anybody wants samples at all. One load.
  bool wanted() const { return threshold_.load(std::memory_order_relaxed) != 0; }
  // A worker, with its index: ids of a batch, -1 among them `zeros` times.
  void observe(std::uint32_t worker, const Layer& layer, const std::int64_t* ids, std::uint32_t count,
               std::uint64_t zeros);

  // Any thread; see engram/sampling.h.
  bool start_curve(const std::vector<const Layer*>& layers, std::uint32_t simulated_rows, std::string& error);
  std::uint64_t read_curve(engram_curve_point* points, std::uint64_t capacity);
  bool start_recording(std::uint64_t threshold, std::uint64_t capacity, std::string& error);
  std::int64_t take_samples(std::uint64_t threshold, std::uint64_t* keys, std::uint64_t capacity,
                            engram_record_state* state);
  void stop_recording();

 private:
  struct Sample {
    std::uint64_t key;
    std::uint32_t row_bytes;
    std::uint32_t hash;
  };
  // A ring with one producer, its worker, and one consumer at a time, under mutex_.
  struct alignas(64) Source {
    Counter lookups;  // by the worker
    Counter lost;
    std::atomic<std::uint64_t> written{0};
    alignas(64) std::atomic<std::uint64_t> read{0};
    std::unique_ptr<Sample[]> samples;  // made before the threshold is first set
  };
  // A cache of one row size at one point of the curve.
  struct Imitation {
    std::uint32_t row_bytes;
    std::uint64_t threshold;
    std::unique_ptr<CacheSimulation> cache;
    std::uint64_t sampled = 0;
    std::uint64_t misses = 0;
    std::uint64_t reference_misses = 0;  // of the reference cache, in this one's sample
  };
  // The largest caches with the highest sampling rate, one of each row size, are references: how far a smaller sample
  // is from the truth for a reference tells how far it is for a larger cache, whose misses are mostly the same
  // (a ratio estimator).
  struct Point {
    std::uint64_t bytes = 0;  // of the rows that the cache would hold
    std::uint64_t rows = 0;
    std::vector<Imitation> imitations;  // one for each row size, in the same order in all points
  };
  struct Recording {
    std::uint64_t threshold = 0;  // 0 = none runs
    std::uint64_t capacity = 0;
    std::uint64_t lookups_before = 0;
    std::uint64_t lost_before = 0;
    std::uint64_t lost = 0;  // by a full buffer of this recording
    std::vector<std::uint64_t> keys;
    std::uint64_t taken = 0;  // of keys
    std::int64_t looked_after_ns = 0;
  };

  void start_thread();  // mutex_ is held
  void run();
  void collect();                   // mutex_ is held
  void feed(const Sample& sample);  // mutex_ is held
  void end_recording();             // mutex_ is held
  void set_threshold();             // mutex_ is held
  std::uint64_t sum(Counter Source::*counter) const;

  std::atomic<std::uint64_t> threshold_{0};
  std::uint32_t workers_;
  std::unique_ptr<Source[]> sources_;
  std::atomic<bool> samples_waiting_{false};

  std::mutex mutex_;  // what follows
  std::vector<Point> curve_;
  std::vector<std::size_t> references_;  // index into curve_, for each row size
  std::uint64_t lookups_before_curve_ = 0;
  std::uint64_t lost_before_curve_ = 0;
  Recording recording_;
  bool stop_ = false;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace engram

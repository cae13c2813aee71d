// A worker: one thread that serves some of the sessions. It takes requests from their rings, looks rows up in DRAM,
// reads the pages that are missing, and completes the slots. One loop, no blocking call but the reader's wait.
//
// Order of service: small batches (up to kSmallRows) are looked up as soon as they are taken, and their pages go to the
// reader first, all but every eighth turn; large batches are looked up block by block, so that small ones never wait
// for more than a block; sessions take turns, whatever number of batches each has; prefetches read when no demand is
// queued.
//
// Everything here belongs to the worker's thread, except for what is marked "any thread".
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cache/row_cache.h"
#include "engine/batch.h"
#include "engine/counters.h"
#include "engine/distinct_rows.h"
#include "engine/event_queue.h"
#include "engine/fair_queue.h"
#include "engine/layer.h"
#include "engine/prefetch_quota.h"
#include "engine/ring_session.h"
#include "engine/row_sampler.h"
#include "engine/state_page.h"
#include "engine/stream_poll.h"
#include "io/page_reader.h"

namespace engram {

class Worker;

// What all workers of an engine share.
struct EngineShared {
  static constexpr std::uint32_t kMaxHandles = 1u << 14;

  // By handle - 1. Layers are added while workers run and never removed (a retired one is small).
  std::vector<std::atomic<Layer*>> layers{kMaxHandles};
  std::unique_ptr<StatePage> state;
  EventQueue events;
  CompletionQueue completions;          // of local requests that nobody waits for
  std::unique_ptr<RowSampler> sampler;  // made before the workers
  std::atomic<bool> stopping{false};
  std::vector<Worker*> workers;  // set before the first session

  // Large batches whose blocks any worker may take, oldest first.
  std::mutex sharing_mutex;
  std::vector<Batch*> sharing;                   // under sharing_mutex
  std::atomic<std::uint32_t> shared_batches{0};  // its size; a hint

  Layer* layer(std::uint32_t handle) const {
    if (handle < 1 || handle > kMaxHandles) return nullptr;
    return layers[handle - 1].load(std::memory_order_acquire);
  }
};

struct WorkerOptions {
  std::uint32_t index = 0;
  std::uint32_t in_flight_cap = 128;
  std::uint32_t spin_us = 30;
  std::uint32_t poll_permille = 100;
  std::uint32_t prefetch_rows = 1u << 19;  // of a session, queued at once
  std::uint32_t reader = ENGRAM_READER_AUTO;
  std::uint32_t page_bytes = 4096;  // of the largest page
};

class Worker {
 public:
  static constexpr std::uint32_t kSmallRows = 512;  // one block of a look-up

  Worker(EngineShared& shared, const WorkerOptions& options);
  ~Worker();

  // Starts the thread and waits until its reader is open. False, with a sentence, where there is none to be had.
  bool start(std::string& error);
  // Stops the thread after its reads have landed. Open requests get no answer.
  void stop();

  // A worker that was never started, on its caller's thread: serves a small fetch whose rows are all resident, so that
  // its outcome is there afterwards. False, with nothing done or counted, for any other request: a started worker's.
  bool serve_at_once(const std::shared_ptr<LocalRequest>& local);

  // Any thread:
  void add_session(std::unique_ptr<RingSession> session);
  void close_session(std::uint64_t session);
  void add_local(std::shared_ptr<LocalRequest> request);
  // Waits until everything answered before is counted.
  void settle_counters();
  // Ends the worker's sleep, if it sleeps, so that it sees a shared batch.
  void wake_if_asleep();
  std::uint64_t open_requests() const { return open_requests_.load(std::memory_order_seq_cst); }
  std::uint32_t reads_in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  bool reads_with_io_uring() const { return io_uring_.load(std::memory_order_relaxed); }
  const LatencyHistogram& latency(std::uint32_t size_class) const { return latency_[size_class]; }
  std::uint64_t prefetch_dropped_rows() const { return prefetch_dropped_rows_.read(); }
  std::uint64_t prefetch_queued_rows() const { return prefetch_quota_.queued(); }

 private:
  struct Mail {
    std::unique_ptr<RingSession> opened;
    std::uint64_t closed = 0;
    std::shared_ptr<LocalRequest> local;
    std::shared_ptr<std::promise<void>> settled;
  };
  // The ids of a batch that is answered, still to be counted.
  struct PendingCount {
    LayerCounters* counters = nullptr;  // of a layer: lives as long as the engine
    std::vector<std::int64_t> ids;
    std::uint32_t next = 0;
  };
  struct InFlight {
    PageRead read;
    Batch* batch = nullptr;
    std::uint32_t page = 0;  // index into the batch's pages
  };
  // Batches with pages to read, and how many reads may be in flight for one of them to get a place.
  struct PageQueue {
    FairQueue<Batch*> batches;
    std::uint32_t in_flight_limit = 0;
  };

  // worker.cpp: the loop
  void run(std::string* error, std::atomic<int>* started);
  bool open_reader(std::string& error);
  bool take_mail();
  void sleep();
  bool anything_submitted() const;
  bool has_armed_session() const;
  void retire_closed_sessions();
  void post(Mail mail);

  // worker_requests.cpp: from slots to batches and back
  bool take_requests();
  bool take_from(RingSession& session);
  bool take_streams(RingSession& session);
  bool end_session_of_violator(RingSession& session, const char* what);
  void arm_streams(RingSession& session, std::uint32_t slot, const engram_request& request);
  void begin_ring_request(RingSession& session, std::uint32_t slot, const engram_request& request);
  void refuse(std::unique_ptr<Batch> batch);
  std::unique_ptr<Batch> local_batch(const std::shared_ptr<LocalRequest>& local, bool* good);  // worker_local.cpp
  void begin_local_request(const std::shared_ptr<LocalRequest>& local);                        // worker_local.cpp
  bool check_request(const engram_request& request, std::uint64_t ids_bytes, std::uint64_t reply_bytes,
                     std::uint64_t max_reply_bytes, engram_failure& failure) const;
  bool enter_layer(Batch& batch);
  void begin_batch(std::unique_ptr<Batch> batch, const std::uint8_t* ids);
  void run_batch(std::unique_ptr<Batch> batch, const std::uint8_t* ids);
  void count_request(Batch& batch);
  void complete(Batch* batch);
  void answer(Batch& batch, const engram_failure& outcome);
  std::unique_ptr<Batch> spare_batch();
  void keep_spare(std::unique_ptr<Batch> batch);

  // worker_ids.cpp: ids, from the client's memory
  std::uint32_t take_ids(Batch& batch, std::uint32_t begin, std::uint32_t count, std::uint64_t* zeros);
  bool take_all_ids(Batch& batch);
  void fail_bad_id(Batch& batch, std::uint32_t position);

  // worker_lookup.cpp: rows in DRAM
  bool look_up_next_large();
  void look_up_block(Batch& batch);
  void copy_block(Batch& batch, std::uint32_t begin, std::uint32_t count);
  void copy_resident(Batch& batch, std::uint32_t begin, std::uint32_t count);
  void copy_resident_parts(Batch& batch, const ResidentRows& resident, std::uint32_t begin, std::uint32_t count);
  void copy_cached(Batch& batch, RowCache& cache, std::uint32_t begin, std::uint32_t count);
  void account(Batch& batch, std::uint32_t begin, std::uint32_t count);
  void find_duplicates(Batch& batch);
  void miss(Batch& batch, std::uint32_t position);
  void end_look_up(Batch& batch);

  // worker_distinct.cpp: counts that nobody waits for
  void count_distinct_later(Batch& batch);
  bool count_distinct_step();

  // worker_shared.cpp: large batches, several workers
  void share(Batch& batch);
  void withdraw(Batch& batch);
  void look_up_shared_block(Batch& batch);
  bool copy_shared_block(Batch& batch);
  bool help_with_block();

  // worker_pages.cpp: rows on the drive
  void queue_pages(Batch& batch);
  bool submit_reads();
  PageQueue& page_queue(const Batch& batch);
  PageQueue* next_queue_to_read();
  bool reap_reads();
  void finish_read(InFlight& flight);
  void read_again(InFlight& flight);
  bool serve_position(Batch& batch, const MissPage& page, const std::uint8_t* buffer, std::uint32_t position);
  void fail_position(Batch& batch, std::uint64_t page, std::uint32_t position, std::uint32_t status,
                     std::int32_t error_number);

  EngineShared& shared_;
  const WorkerOptions options_;
  std::thread thread_;

  std::mutex mail_mutex_;
  std::vector<Mail> mail_;             // under mail_mutex_
  std::atomic<bool> asleep_{false};    // sequentially consistent
  std::atomic<bool> has_mail_{false};  // set under mail_mutex_, sequentially consistent
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> open_requests_{0};
  std::atomic<std::uint32_t> in_flight_{0};
  std::atomic<bool> io_uring_{false};
  LatencyHistogram latency_[ENGRAM_LATENCY_CLASSES];
  Counter prefetch_dropped_rows_;

  std::unique_ptr<PageBuffers> buffers_;
  std::unique_ptr<PageReader> reader_;
  std::mutex reader_mutex_;        // guards the pointer against wake() from other threads at start and stop
  std::vector<InFlight> flights_;  // by buffer
  std::vector<std::uint32_t> free_buffers_;
  std::vector<std::uint32_t> wrong_positions_;  // of the page at hand: their checksum failed
  std::vector<std::unique_ptr<RingSession>> sessions_;
  std::size_t next_session_ = 0;                 // round robin
  std::vector<std::unique_ptr<Batch>> batches_;  // owns the open ones
  std::vector<std::unique_ptr<Batch>> spare_batches_;
  FairQueue<Batch*> looking_up_;            // large batches with look-ups to do
  std::deque<Batch*> looking_up_prefetch_;  // the same, after all demand
  PageQueue small_pages_;
  PageQueue large_pages_;
  PageQueue prefetch_pages_;
  bool reads_due_ = false;         // more pages could go to the drive at once
  std::uint32_t small_turns_ = 0;  // small batches' turns since a large one that waits had its own
  PrefetchQuota prefetch_quota_;
  std::uint32_t small_open_ = 0;   // small batches that wait for reads
  bool retire_later_ = false;      // a closing session may be free of requests now
  DistinctRows distinct_;          // for the batch at hand
  DistinctRows pending_distinct_;  // for the oldest pending count
  static constexpr std::size_t kSpareIds = 64;
  std::deque<PendingCount> pending_counts_;
  std::uint64_t pending_rows_ = 0;
  std::vector<std::vector<std::int64_t>> spare_ids_;
  StreamPoll stream_poll_;
  std::vector<std::uint8_t> zero_row_;
  std::int64_t last_demand_ns_ = 0;  // when a fetch was last taken
  std::int64_t last_small_ns_ = 0;   // when a small one was
};

}  // namespace engram

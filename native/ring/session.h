// Session: one connection to a daemon, its mapped ring and arena, and the tickets in use.
//
// What is whose: the daemon owns a slot from the store of submit_tail until its completion word is set; otherwise the
// slot, its ids and its reply range belong to one ticket, which is a slot number and a serial that changes at release.
// `lock_` guards who owns what (slots, ranges, the tail) and is held for some tens of instructions, never while ids or
// rows are copied or anything waits.
//
// A ticket released before its completion came is a zombie: slot and ranges stay taken until the daemon has completed
// it, since the daemon may still write there.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "common/mapping.h"
#include "common/unique_fd.h"
#include "ring/catalogue.h"
#include "ring/extents.h"
#include "ring/handshake.h"
#include "ring/session_requests.h"
#include "ring/session_totals.h"
#include "ring/stream_watchdog.h"

namespace engram {

// What one submission asks for.
struct Submission {
  const engram_layer* layer;
  const void* ids;
  uint64_t row_count;
  uint32_t id_bytes;
  uint32_t layout = ENGRAM_LAYOUT_PACKED;
  uint32_t operation = ENGRAM_OPERATION_FETCH;
  uint64_t request_id = 0;  // 0: a new one
  uint32_t part_index = 0;
  uint32_t part_count = 1;
  uint64_t total_rows = 0;  // 0: row_count
  bool wants_progress = false;
};

// The first rows of a reply that is not complete yet, to be copied before the rest comes.
struct RowsReady {
  const void* reply;
  uint64_t row_count;
};

class Session {
 public:
  // Nothing, with `error` filled in, where no session could be had.
  static Session* connect(const char* path, const engram_connect_options& options, engram_error* error);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // See engram/client.h for these.
  void free();
  void close();
  // The session's memory stays until as many drops.
  void add_reference() { references_.fetch_add(1, std::memory_order_relaxed); }
  void drop_reference();
  int check(engram_error* error);
  int64_t submit(const Submission& submission, int32_t wait_ms, engram_error* error);
  const void* wait(int64_t ticket, int32_t timeout_ms, engram_error* error);
  // Of a request that wants progress: spins until more than `seen` rows are ready, or it is time to wait(). Then the
  // count is `seen`.
  RowsReady spin_for_rows(int64_t ticket, uint64_t seen);
  int resubmit(int64_t ticket, const engram_layer& layer, engram_error* error);
  void release(int64_t ticket);
  int refresh(engram_error* error);
  // See engram/client.h.
  int map_layer(uint32_t handle, engram_map& map, UniqueFd& file, engram_error* error);
  int unmap_layer(uint32_t handle, engram_error* error);

  const engram_welcome& welcome() const { return welcome_; }
  uint64_t ticket_rows(uint32_t row_bytes) const;
  // Whether waits spin at all.
  bool spins() const { return spin_us_ != 0; }
  uint64_t next_request_id() { return request_id_.fetch_add(1, std::memory_order_relaxed); }
  void read_usage(engram_session_usage& usage);
  SessionTotals& totals() { return totals_; }
  void read_memory(engram_session_memory& memory) const;
  // session_lanes.cpp; see engram/client.h.
  int open_lane(const engram_layer& layer, uint32_t row_count, uint32_t id_bytes, uint32_t layout, uint32_t deadline_ms,
                engram_lane& lane, engram_error* error);
  void close_lane(const engram_lane& lane);
  // Calls `use` with the catalogue, which cannot change meanwhile.
  template <typename Use>
  auto with_catalogue(Use use) {
    // A child may have inherited the lock in any state, but has no other thread to fear.
    std::unique_lock guard(catalogue_lock_, std::defer_lock);
    if (!in_child_.load()) guard.lock();
    return use(handshake_.catalogue);
  }

  // In a child, right after the fork, where only this thread exists: closes the descriptors, and puts inaccessible
  // memory in the place of the mappings, which the child did not inherit.
  void abandon_in_child();

 private:
  enum class SlotState : uint8_t { kFree, kOpen, kZombie };
  struct LocalSlot {
    SlotState state = SlotState::kFree;  // guarded by lock_
    std::atomic<uint64_t> serial{0};     // changes at release
    std::atomic<int> sleepers{0};        // threads in the kernel for it
    std::atomic<int> holder{0};          // the thread that submitted it or waited on it last
    uint64_t ids_offset = 0;             // constant while the ticket is open, like the next four
    uint64_t ids_bytes = 0;
    uint64_t reply_offset = 0;
    uint64_t reply_bytes = 0;
    uint64_t row_count = 0;
    uint32_t row_bytes = 0;
    bool begins_request = false;          // the only part, or the first
    std::atomic<bool> is_counted{false};  // its outcome is in the totals
  };
  // A thread that waits for room; lies on that thread's stack, in a list guarded by lock_.
  struct RoomWaiter {
    int thread;
    RoomWaiter* next;
  };

  ~Session();
  explicit Session(const engram_connect_options& options);
  int open(const char* path, const engram_connect_options& options, engram_error* error);
  int map(engram_error* error);

  int check_submission(const Submission& submission, engram_error* error) const;
  int take_slot(const Submission& submission, int32_t wait_ms, engram_error* error);
  int wait_for_room(const Submission& submission, int32_t wait_ms, engram_error* error);
  int try_take_slot(const Submission& submission);
  bool is_waiting_hopeless() const;
  void reclaim_zombies();
  void free_slot(int slot);
  void send(int slot);
  int64_t ticket_of(int slot) const;
  // The slot of an open ticket, or -1.
  int slot_of(int64_t ticket) const;
  int spin(int slot, int64_t ticket, int64_t began_ns, uint64_t seen_rows = UINT64_MAX) const;
  uint64_t rows_ready(int slot) const;
  void count_outcome(LocalSlot& local, uint32_t status);
  int64_t spin_ns(uint64_t row_count) const;
  bool is_daemon_dead() const;
  // For the watchdog's thread: whether nobody will answer any more; asks for the worker's attention.
  friend class StreamWatchdog;
  bool is_gone(bool thorough) { return is_serving(thorough, nullptr) != 0; }
  bool arm_streams(uint32_t lease_ms);
  void wake_worker();
  int is_serving(bool thorough, engram_error* error);
  void take_late_answer();
  int report(int slot, int status, engram_error* error) const;

  engram_slot& shared_slot(int slot) const;
  uint32_t completion(int slot) const;
  const engram_state& state() const { return *reinterpret_cast<const engram_state*>(state_map_.data()); }

  Handshake handshake_;  // its socket and doorbell stay open; its catalogue is guarded by catalogue_lock_
  engram_welcome welcome_{};
  const int32_t spin_us_;
  const uint32_t flags_;  // ENGRAM_CONNECT_*
  Mapping ring_;
  Mapping arena_;
  Mapping state_map_;

  // The handle and each open ticket: so the rows of a ticket stay mapped after the handle is freed.
  std::atomic<uint32_t> references_{1};
  std::atomic<bool> closed_{false};
  std::atomic<bool> in_child_{false};
  std::atomic<const char*> lost_{nullptr};  // why, once known
  std::atomic<uint64_t> request_id_{1};
  SessionTotals totals_;

  std::mutex catalogue_lock_;
  SessionRequests requests_;  // guarded by catalogue_lock_
  std::mutex lock_;
  uint32_t tail_ = 0;  // ours; never read back from the ring
  uint32_t zombie_count_ = 0;
  uint32_t free_count_ = 0;
  std::array<uint8_t, ENGRAM_MAX_SLOTS> free_slots_;  // a stack: last released, first used
  std::array<LocalSlot, ENGRAM_MAX_SLOTS> slots_;
  ExtentAllocator ids_extents_;
  ExtentAllocator reply_extents_;
  std::array<bool, ENGRAM_MAX_SLOTS> lane_taken_{};  // by stream slot, guarded by lock_
  std::unique_ptr<StreamWatchdog> watchdog_;         // guarded by lock_; its thread uses the above
  RoomWaiter* waiters_ = nullptr;
  std::atomic<uint32_t> room_futex_{0};  // changes when room was given back while somebody waited
};

}  // namespace engram

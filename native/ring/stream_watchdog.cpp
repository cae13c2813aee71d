#include "ring/stream_watchdog.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>

#include "common/masked_thread.h"
#include "ring/futex.h"
#include "ring/session.h"

namespace engram {
namespace {

constexpr auto kTick = std::chrono::milliseconds(2);
constexpr int kThoroughTicks = 10;  // the socket is asked every so many ticks
constexpr uint32_t kLeaseMs = 10'000;
constexpr int64_t kRenewNs = 3'000'000'000;

template <typename Word>
std::atomic_ref<Word> atomic(Word& word) {
  return std::atomic_ref<Word>(word);
}

}  // namespace

StreamWatchdog::StreamWatchdog(Session& session) : session_(session) {
  thread_ = masked_thread([this] { run(); });
}

StreamWatchdog::~StreamWatchdog() {
  {
    const std::lock_guard guard(lock_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StreamWatchdog::watch(engram_slot* slot, uint32_t deadline_ms) {
  {
    const std::lock_guard guard(lock_);
    lanes_.push_back({slot, int64_t{deadline_ms} * 1'000'000});
    was_used_ = true;
  }
  changed_.notify_all();
}

bool StreamWatchdog::is_pending(const Lane& lane) {
  const uint64_t completed = atomic(lane.slot->reply.stream_completed).load(std::memory_order_relaxed);
  return atomic(lane.slot->doorbell).load(std::memory_order_relaxed) != 0 ||
         atomic(lane.slot->reply.stream_taken).load(std::memory_order_relaxed) != completed;
}

bool StreamWatchdog::unwatch(engram_slot* slot) {
  const std::lock_guard guard(lock_);
  const auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& one) { return one.slot == slot; });
  if (lane == lanes_.end()) return false;
  const bool is_free = !lane->lost && !is_pending(*lane);
  lanes_.erase(lane);
  return is_free;
}

void StreamWatchdog::look(Lane& lane, int64_t now, bool gone) {
  engram_slot& slot = *lane.slot;
  if (!lane.lost && is_pending(lane)) {
    // The stream may have gone on to the next use between two ticks: each use has a deadline of its own.
    const uint64_t use = atomic(slot.reply.stream_completed).load(std::memory_order_relaxed) + 1;
    if (lane.pending_since_ns == 0 || lane.seen_use != use) {
      lane.seen_use = use;
      lane.pending_since_ns = now;
      was_used_ = true;
    }
    if (atomic(slot.doorbell).load(std::memory_order_relaxed) != 0) session_.wake_worker();
  } else {
    lane.pending_since_ns = 0;
  }
  const bool late = lane.pending_since_ns != 0 && now - lane.pending_since_ns > lane.deadline_ns;
  if (!lane.lost && (gone || late)) {
    lane.lost = true;
    // The latch comes first: whoever sees LOST, or a late completion after it, sees the latch too.
    const uint32_t why = gone ? ENGRAM_STREAM_DAEMON_LOST : ENGRAM_STREAM_DEADLINE;
    atomic(slot.stream_lost).store(why, std::memory_order_seq_cst);
  }
  if (lane.lost) {
    uint32_t empty = ENGRAM_STATUS_EMPTY;
    atomic(slot.reply.completion).compare_exchange_strong(empty, ENGRAM_STATUS_LOST, std::memory_order_seq_cst);
  }
}

void StreamWatchdog::run() {
  int64_t leased_at_ns = 0;
  int tick = 0;
  std::unique_lock guard(lock_);
  while (!stopping_) {
    if (lanes_.empty()) {
      changed_.wait(guard, [this] { return stopping_ || !lanes_.empty(); });
      continue;
    }
    const int64_t now = monotonic_ns();
    const bool gone = session_.is_gone(tick++ % kThoroughTicks == 0);
    for (Lane& lane : lanes_) look(lane, now, gone);
    if (was_used_ && !gone && (leased_at_ns == 0 || now - leased_at_ns > kRenewNs)) {
      // Callers hold the session's lock when they take this one.
      guard.unlock();
      const bool leased = session_.arm_streams(kLeaseMs);
      guard.lock();
      if (leased) {
        was_used_ = false;
        leased_at_ns = now;
      }
    }
    changed_.wait_for(guard, kTick, [this] { return stopping_; });
  }
  // Nobody looks after them from here on: streams that wait now are let go.
  for (Lane& lane : lanes_) look(lane, monotonic_ns(), true);
}

}  // namespace engram

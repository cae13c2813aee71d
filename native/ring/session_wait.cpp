// Waiting for a ticket's completion, and what it says.
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "ring/error.h"
#include "ring/fork_registry.h"
#include "ring/session.h"
#include "ring/session_detail.h"

namespace engram {

int64_t Session::spin_ns(uint64_t row_count) const {
  if (spin_us_ >= 0) return int64_t{spin_us_} * 1000;
  return std::min<int64_t>(500'000, 20'000 + static_cast<int64_t>(row_count) * 100);
}

// Looks at the completion word for a while, or until more than `seen_rows` are ready; returns its last value.
int Session::spin(int slot, int64_t ticket, int64_t began_ns, uint64_t seen_rows) const {
  const uint32_t& word = shared_slot(slot).reply.completion;
  uint32_t status = atomic(word).load(std::memory_order_acquire);
  const int64_t limit_ns = spin_ns(slots_[slot].row_count);
  if (status != ENGRAM_STATUS_EMPTY || limit_ns == 0) return static_cast<int>(status);
  const int64_t end = began_ns + limit_ns;
  for (uint32_t turn = 1;; ++turn) {
    spin_pause();
    status = atomic(word).load(std::memory_order_acquire);
    if (status != ENGRAM_STATUS_EMPTY || rows_ready(slot) > seen_rows) return static_cast<int>(status);
    if (turn % 16 != 0) continue;
    // The worker may need this very CPU.
    ::sched_yield();
    const bool is_over =
        monotonic_ns() >= end || closed_.load(std::memory_order_relaxed) || slot_of(ticket) < 0 || is_daemon_dead();
    if (is_over) return static_cast<int>(status);
  }
}

// Acquire: the rows are there.
uint64_t Session::rows_ready(int slot) const {
  return atomic(shared_slot(slot).reply.rows_ready).load(std::memory_order_acquire);
}

RowsReady Session::spin_for_rows(int64_t ticket, uint64_t seen) {
  const int slot = slot_of(ticket);
  if (slot < 0 || in_child_.load(std::memory_order_relaxed)) return {nullptr, seen};
  const int64_t began_ns = monotonic_ns();
  spin(slot, ticket, began_ns, seen);
  totals_.add_wait(monotonic_ns() - began_ns);
  const LocalSlot& local = slots_[slot];
  // The daemon is as trusted as the rows it sends; a count out of range is taken for none all the same.
  const uint64_t ready = rows_ready(slot);
  return {arena_.data() + local.reply_offset, ready > seen && ready <= local.row_count ? ready : seen};
}

// Once for each ticket, whoever waits on it; STALE is not an outcome, since the request is sent again.
void Session::count_outcome(LocalSlot& local, uint32_t status) {
  if (status == ENGRAM_STATUS_STALE || local.is_counted.exchange(true, std::memory_order_relaxed)) return;
  if (status != ENGRAM_STATUS_OK) {
    totals_.add_failure();
  } else if (local.reply_bytes != 0) {
    totals_.add_reply(local.begins_request, local.row_count, local.reply_bytes);
  }
}

const void* Session::wait(int64_t ticket, int32_t timeout_ms, engram_error* error) {
  if (in_child_.load(std::memory_order_relaxed)) {
    is_serving(false, error);
    return nullptr;
  }
  const int slot = slot_of(ticket);
  if (slot < 0) {
    fail(error, ENGRAM_CLIENT_CLOSED, 0, "the ticket is released");
    return nullptr;
  }
  LocalSlot& local = slots_[slot];
  // Whoever waits on a ticket is its holder from now on: tickets may be handed from thread to thread.
  local.holder.store(current_thread(), std::memory_order_relaxed);
  engram_slot& shared = shared_slot(slot);
  uint32_t status = completion(slot);
  const int64_t began_ns = status == ENGRAM_STATUS_EMPTY && timeout_ms != 0 ? monotonic_ns() : 0;
  if (began_ns != 0) status = static_cast<uint32_t>(spin(slot, ticket, began_ns));
  const auto count_wait = [&] {
    if (began_ns != 0) totals_.add_wait(monotonic_ns() - began_ns);
  };
  if (status == ENGRAM_STATUS_EMPTY) {
    const int64_t deadline = deadline_ns(timeout_ms);
    atomic(shared.waiting).store(1, std::memory_order_seq_cst);
    for (;;) {
      status = atomic(shared.reply.completion).load(std::memory_order_seq_cst);
      if (status != ENGRAM_STATUS_EMPTY || slot_of(ticket) < 0) break;
      if (is_serving(true, error) != 0) {
        // What completed before the end still counts.
        status = completion(slot);
        if (status != ENGRAM_STATUS_EMPTY) break;
        count_wait();
        return nullptr;
      }
      const int64_t left = deadline == INT64_MAX ? kSliceNs : deadline - monotonic_ns();
      if (left <= 0) {
        count_wait();
        fail(error, ENGRAM_STATUS_TIMEOUT, 0, "no completion within %d ms", timeout_ms);
        return nullptr;
      }
      local.sleepers.fetch_add(1);
      const int outcome =
          futex_wait(&shared.reply.completion, ENGRAM_STATUS_EMPTY, std::min(kSliceNs, left), FutexScope::kShared);
      // The daemon wakes one thread; that one wakes the others that wait for the same ticket.
      if (local.sleepers.fetch_sub(1) > 1 && outcome == 0) {
        futex_wake_all(&shared.reply.completion, FutexScope::kShared);
      }
      if (outcome == EINTR) {
        count_wait();
        fail(error, ENGRAM_CLIENT_AGAIN, EINTR, "interrupted by a signal");
        return nullptr;
      }
    }
  }
  count_wait();
  if (slot_of(ticket) < 0) {
    fail(error, ENGRAM_CLIENT_CLOSED, 0, "the ticket was released by another thread");
    return nullptr;
  }
  count_outcome(local, status);
  if (status == ENGRAM_STATUS_OK) return arena_.data() + local.reply_offset;
  report(slot, static_cast<int>(status), error);
  return nullptr;
}

// Turns a completion that is not OK into the caller's error.
int Session::report(int slot, int status, engram_error* error) const {
  const engram_reply& shared = shared_slot(slot).reply;
  const uint64_t position = atomic(shared.position).load(std::memory_order_relaxed);
  const int64_t row_id = atomic(shared.row_id).load(std::memory_order_relaxed);
  const uint64_t page = atomic(shared.page).load(std::memory_order_relaxed);
  const int32_t error_number = atomic(shared.error_number).load(std::memory_order_relaxed);
  switch (status) {
    case ENGRAM_STATUS_ROW_ID:
      fail(error, status, 0, "row id %" PRId64 " at position %" PRIu64 " is outside the table", row_id, position);
      break;
    case ENGRAM_STATUS_UNKNOWN_TABLE:
      fail(error, status, 0, "the daemon does not know the table");
      break;
    case ENGRAM_STATUS_STALE:
      fail(error, status, 0, "the table was reloaded");
      break;
    case ENGRAM_STATUS_BUSY:
      fail(error, status, 0, "the daemon has reached a limit");
      break;
    case ENGRAM_STATUS_PAGE_CORRUPT:
      fail(error, status, 0, "page %" PRIu64 " is corrupt: row %" PRId64 " does not match its checksum", page, row_id);
      break;
    case ENGRAM_STATUS_READ_FAILED:
      fail(error, status, error_number, "page %" PRIu64 " with row %" PRId64 " could not be read: %s", page, row_id,
           ::strerrordesc_np(error_number) != nullptr ? ::strerrordesc_np(error_number) : "unknown error");
      break;
    case ENGRAM_STATUS_BAD_REQUEST:
      fail(error, status, 0, "the daemon refused the request as malformed");
      break;
    case ENGRAM_STATUS_STOPPING:
      fail(error, status, 0, "the daemon is shutting down");
      break;
    case ENGRAM_STATUS_LOST:
      fail(error, status, 0, "the session is lost");
      break;
    default:
      return fail(error, ENGRAM_CLIENT_PROTOCOL, 0, "the daemon completed a request with the unknown status %d",
                  status);
  }
  if (error != nullptr) {
    error->position = position;
    error->row_id = row_id;
    error->page = page;
  }
  return status;
}

}  // namespace engram

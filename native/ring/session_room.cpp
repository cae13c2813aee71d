// Slots and ranges of a session: taking them, sending a request, waiting for room, giving back.
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "ring/error.h"
#include "ring/fork_registry.h"
#include "ring/narrow_ids.h"
#include "ring/session.h"
#include "ring/session_detail.h"

namespace engram {
namespace {

bool is_thread_alive(int thread) {
  return ::syscall(SYS_tgkill, ::getpid(), thread, 0) == 0 || errno != ESRCH;
}

}  // namespace

int Session::check_submission(const Submission& submission, engram_error* error) const {
  if (submission.layer == nullptr || submission.ids == nullptr || submission.row_count == 0) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, EINVAL, "a request needs a layer and at least one id");
  }
  if ((submission.id_bytes != 4 && submission.id_bytes != 8) || submission.layout > ENGRAM_LAYOUT_SPLIT) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, EINVAL, "ids are 4 or 8 bytes wide, the layout is packed or split");
  }
  const uint64_t limit = ticket_rows(submission.layer->row_bytes);
  if (submission.row_count > limit) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, E2BIG,
                "%" PRIu64 " rows are more than one ticket holds: max_ticket_rows is %" PRIu64, submission.row_count,
                limit);
  }
  return 0;
}

int64_t Session::submit(const Submission& submission, int32_t wait_ms, engram_error* error) {
  if (const int status = is_serving(false, error)) return -status;
  if (requests_.is_owed_answer()) [[unlikely]]
    take_late_answer();
  if (const int status = check_submission(submission, error)) return -status;
  const int slot = take_slot(submission, wait_ms, error);
  if (slot < 0) return slot;
  const LocalSlot& local = slots_[slot];
  std::byte* ids = ring_.data() + welcome_.geometry.ids_offset + local.ids_offset;
  uint32_t id_bytes = submission.id_bytes;
  if (id_bytes == 8 &&
      narrow_ids(static_cast<const int64_t*>(submission.ids), submission.row_count, reinterpret_cast<int32_t*>(ids))) {
    id_bytes = 4;
  } else {
    std::memcpy(ids, submission.ids, submission.row_count * id_bytes);
  }
  engram_request& request = shared_slot(slot).request;
  request.operation = submission.operation;
  request.handle = submission.layer->handle;
  request.row_count = static_cast<uint32_t>(submission.row_count);
  request.id_bytes = static_cast<uint16_t>(id_bytes);
  request.layout = static_cast<uint16_t>(submission.layout);
  request.ids_offset = local.ids_offset;
  request.reply_offset = local.reply_offset;
  request.request_id = submission.request_id != 0 ? submission.request_id : next_request_id();
  request.part_index = submission.part_index;
  request.part_count = submission.part_count;
  request.total_rows = submission.total_rows != 0 ? submission.total_rows : submission.row_count;
  request.flags = submission.wants_progress ? ENGRAM_REQUEST_PROGRESS : 0;
  request.reserved = 0;
  // Taken before the slot is sent: from then on another thread may release it.
  const int64_t ticket = ticket_of(slot);
  send(slot);
  return ticket;
}

int64_t Session::ticket_of(int slot) const {
  return static_cast<int64_t>(slots_[slot].serial.load(std::memory_order_relaxed) << kSlotBits) | slot;
}

// Hands a slot whose request line is written to the daemon, and rings where the worker sleeps.
void Session::send(int slot) {
  engram_slot& shared = shared_slot(slot);
  atomic(shared.waiting).store(0, std::memory_order_relaxed);
  atomic(shared.reply.completion).store(ENGRAM_STATUS_EMPTY, std::memory_order_relaxed);
  atomic(shared.reply.rows_ready).store(0, std::memory_order_relaxed);
  auto& block = *reinterpret_cast<engram_submit_block*>(ring_.data() + welcome_.geometry.submit_offset);
  auto* queue = reinterpret_cast<uint32_t*>(&block + 1);
  {
    const std::lock_guard guard(lock_);
    atomic(queue[tail_ & (welcome_.geometry.slot_count - 1)])
        .store(static_cast<uint32_t>(slot), std::memory_order_relaxed);
    ++tail_;
    atomic(block.submit_tail).store(tail_, std::memory_order_seq_cst);
  }
  wake_worker();
}

void Session::wake_worker() {
  if (atomic(state().worker_asleep[welcome_.worker]).load(std::memory_order_seq_cst) == 0) return;
  const uint64_t one = 1;
  // A full counter (EAGAIN) has rung already.
  [[maybe_unused]] const ssize_t written = ::write(handshake_.doorbell.get(), &one, sizeof one);
}

int Session::take_slot(const Submission& submission, int32_t wait_ms, engram_error* error) {
  {
    const std::lock_guard guard(lock_);
    const int slot = try_take_slot(submission);
    if (slot >= 0) return slot;
  }
  return wait_for_room(submission, wait_ms, error);
}

int Session::try_take_slot(const Submission& submission) {
  if (zombie_count_ > 0) reclaim_zombies();
  if (free_count_ == 0) return -1;
  const uint64_t ids_bytes = submission.row_count * submission.id_bytes;
  const bool has_reply = submission.operation == ENGRAM_OPERATION_FETCH;
  const uint64_t reply_bytes = has_reply ? submission.row_count * submission.layer->row_bytes : 0;
  const auto ids_offset = ids_extents_.take(ids_bytes);
  if (!ids_offset) return -1;
  const auto reply_offset = reply_extents_.take(reply_bytes);
  if (!reply_offset) {
    ids_extents_.give_back(*ids_offset, ids_bytes);
    return -1;
  }
  const int slot = free_slots_[--free_count_];
  LocalSlot& local = slots_[slot];
  local.state = SlotState::kOpen;
  references_.fetch_add(1, std::memory_order_relaxed);
  local.holder.store(current_thread(), std::memory_order_relaxed);
  local.ids_offset = *ids_offset;
  local.ids_bytes = ids_bytes;
  local.reply_offset = *reply_offset;
  local.reply_bytes = reply_bytes;
  local.row_count = submission.row_count;
  local.row_bytes = submission.layer->row_bytes;
  local.begins_request = submission.part_index == 0;
  local.is_counted.store(false, std::memory_order_relaxed);
  return slot;
}

int Session::wait_for_room(const Submission& submission, int32_t wait_ms, engram_error* error) {
  const auto busy = [&](int status, const char* why) {
    return -fail(error, status, 0, "no room for a request of %" PRIu64 " rows (%" PRIu64 " bytes): %s",
                 submission.row_count, submission.row_count * submission.layer->row_bytes, why);
  };
  const int64_t deadline = deadline_ns(wait_ms);
  std::unique_lock guard(lock_);
  RoomWaiter self{current_thread(), waiters_};
  waiters_ = &self;
  const auto leave = [&] {
    RoomWaiter** link = &waiters_;
    while (*link != &self) link = &(*link)->next;
    *link = self.next;
  };
  for (;;) {
    int result = try_take_slot(submission);
    int status = 0;
    if (result < 0) {
      if (wait_ms == 0) {
        result = busy(ENGRAM_STATUS_BUSY, "slots or arena are in use");
      } else if (is_waiting_hopeless()) {
        result = busy(ENGRAM_STATUS_BUSY, "it is held by unreleased tickets of threads that wait for room themselves");
      } else if ((status = is_serving(true, error)) != 0) {
        result = -status;
      } else if (monotonic_ns() >= deadline) {
        result = busy(ENGRAM_STATUS_TIMEOUT, "no ticket was released in time");
      } else {
        result = -ENGRAM_CLIENT_AGAIN;
      }
    }
    if (result != -ENGRAM_CLIENT_AGAIN) {
      leave();
      return result;
    }
    // Read under the lock: a release after this point changes it and ends the wait below.
    const uint32_t seen = room_futex_.load();
    const int64_t slice = std::min(kSliceNs, deadline == INT64_MAX ? kSliceNs : deadline - monotonic_ns());
    // Zombies are completed by the daemon, which wakes nobody for them.
    const int64_t sleep_ns = std::max<int64_t>(1, zombie_count_ > 0 ? std::min<int64_t>(slice, 1'000'000) : slice);
    guard.unlock();
    const int outcome =
        futex_wait(reinterpret_cast<const uint32_t*>(&room_futex_), seen, sleep_ns, FutexScope::kProcess);
    guard.lock();
    if (outcome == EINTR) {
      leave();
      return -fail(error, ENGRAM_CLIENT_AGAIN, EINTR, "interrupted by a signal");
    }
  }
}

// Nobody will give room back: each open ticket is held by a thread that waits for room itself, or that has ended.
bool Session::is_waiting_hopeless() const {
  if (zombie_count_ > 0) return false;
  for (uint32_t slot = 0; slot < welcome_.geometry.slot_count; ++slot) {
    if (slots_[slot].state != SlotState::kOpen) continue;
    const int holder = slots_[slot].holder.load(std::memory_order_relaxed);
    const RoomWaiter* waiter = waiters_;
    while (waiter != nullptr && waiter->thread != holder) waiter = waiter->next;
    if (waiter == nullptr && is_thread_alive(holder)) return false;
  }
  return true;
}

void Session::free_slot(int slot) {
  LocalSlot& local = slots_[slot];
  ids_extents_.give_back(local.ids_offset, local.ids_bytes);
  reply_extents_.give_back(local.reply_offset, local.reply_bytes);
  local.state = SlotState::kFree;
  free_slots_[free_count_++] = static_cast<uint8_t>(slot);
}

void Session::reclaim_zombies() {
  for (uint32_t slot = 0; zombie_count_ > 0 && slot < welcome_.geometry.slot_count; ++slot) {
    if (slots_[slot].state == SlotState::kZombie && completion(static_cast<int>(slot)) != ENGRAM_STATUS_EMPTY) {
      free_slot(static_cast<int>(slot));
      --zombie_count_;
    }
  }
}

int Session::slot_of(int64_t ticket) const {
  const int slot = static_cast<int>(ticket & (ENGRAM_MAX_SLOTS - 1));
  if (ticket < 0 || static_cast<uint32_t>(slot) >= welcome_.geometry.slot_count) return -1;
  return slots_[slot].serial.load(std::memory_order_relaxed) == static_cast<uint64_t>(ticket) >> kSlotBits ? slot : -1;
}

void Session::release(int64_t ticket) {
  if (in_child_.load(std::memory_order_relaxed)) {
    // The lock may be in any state here. The ticket's memory is not mapped, so there is nothing else to give back.
    if (ticket < 0) return;
    uint64_t serial = static_cast<uint64_t>(ticket) >> kSlotBits;
    if (slots_[ticket & (ENGRAM_MAX_SLOTS - 1)].serial.compare_exchange_strong(serial, serial + 1)) drop_reference();
    return;
  }
  bool wake;
  {
    const std::lock_guard guard(lock_);
    const int slot = slot_of(ticket);
    if (slot < 0 || slots_[slot].state != SlotState::kOpen) return;
    slots_[slot].serial.fetch_add(1, std::memory_order_relaxed);
    if (completion(slot) != ENGRAM_STATUS_EMPTY) {
      free_slot(slot);
    } else {
      slots_[slot].state = SlotState::kZombie;
      ++zombie_count_;
    }
    wake = waiters_ != nullptr;
    if (wake) room_futex_.fetch_add(1);
  }
  if (wake) futex_wake_all(reinterpret_cast<const uint32_t*>(&room_futex_), FutexScope::kProcess);
  drop_reference();
}

int Session::resubmit(int64_t ticket, const engram_layer& layer, engram_error* error) {
  if (const int status = is_serving(false, error)) return status;
  const int slot = slot_of(ticket);
  if (slot < 0) return fail(error, ENGRAM_CLIENT_CLOSED, 0, "the ticket is released");
  if (completion(slot) == ENGRAM_STATUS_EMPTY) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, EBUSY, "the ticket's request is still running");
  }
  if (layer.row_bytes != slots_[slot].row_bytes) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, EINVAL, "the new layer has rows of %u bytes, the ticket's %u",
                layer.row_bytes, slots_[slot].row_bytes);
  }
  // Ids and ranges are still in place.
  shared_slot(slot).request.handle = layer.handle;
  send(slot);
  return 0;
}

}  // namespace engram

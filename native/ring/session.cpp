#include "ring/session.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "ring/error.h"
#include "ring/fork_registry.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr int64_t kSliceNs = 20'000'000;  // the longest sleep without a look at the daemon's life
constexpr uint32_t kRefreshTimeoutMs = 5000;
constexpr int64_t kSlotBits = 8;
static_assert(ENGRAM_MAX_SLOTS == 1 << kSlotBits);

template <typename Word>
std::atomic_ref<Word> atomic(const Word& word) {
  return std::atomic_ref<Word>(const_cast<Word&>(word));
}

int lost(engram_error* error, const char* why) {
  return fail(error, ENGRAM_STATUS_LOST, 0, "%s", why);
}

bool is_thread_alive(int thread) {
  return ::syscall(SYS_tgkill, ::getpid(), thread, 0) == 0 || errno != ESRCH;
}

// Absolute time of a relative limit; negative limits never end.
int64_t deadline_ns(int32_t timeout_ms) {
  return timeout_ms < 0 ? INT64_MAX : monotonic_ns() + int64_t{timeout_ms} * 1'000'000;
}

}  // namespace

Session* Session::connect(const char* path, const engram_connect_options& options, engram_error* error) {
  auto* session = new Session(options.spin_us);
  if (session->open(path, options, error) == 0) return session;
  session->free();
  return nullptr;
}

// Registered before it has a descriptor, so that a fork at any time finds them all.
Session::Session(int32_t spin_us) : spin_us_(spin_us) {
  register_session(this);
}

int Session::open(const char* path, const engram_connect_options& options, engram_error* error) {
  if (const int status = shake_hands(path, options, handshake_, error)) return status;
  welcome_ = handshake_.welcome;
  ids_extents_ = ExtentAllocator(welcome_.geometry.ids_bytes);
  reply_extents_ = ExtentAllocator(welcome_.geometry.arena_bytes);
  for (uint32_t slot = welcome_.geometry.slot_count; slot-- > 0;) {
    free_slots_[free_count_++] = static_cast<uint8_t>(slot);
  }
  return map(error);
}

Session::~Session() {
  unregister_session(this);
}

int Session::map(engram_error* error) {
  const engram_ring_geometry& geometry = welcome_.geometry;
  ring_ = Mapping::map(handshake_.ring.get(), geometry.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE);
  if (ring_) arena_ = Mapping::map(handshake_.arena.get(), geometry.arena_bytes, PROT_READ, MAP_SHARED | MAP_POPULATE);
  if (arena_) state_map_ = Mapping::map(handshake_.state.get(), welcome_.state_bytes, PROT_READ, MAP_SHARED);
  if (!state_map_) {
    return fail(error, ENGRAM_CLIENT_SYSTEM, errno,
                "cannot map the session's %" PRIu64 " bytes of ring and arena: %m (ulimit -v?)",
                geometry.ring_bytes + geometry.arena_bytes);
  }
  for (const Mapping* mapping : {&ring_, &arena_, &state_map_}) {
    if (::madvise(mapping->data(), mapping->bytes(), MADV_DONTFORK) != 0) {
      return fail(error, ENGRAM_CLIENT_SYSTEM, errno, "madvise(MADV_DONTFORK): %m");
    }
  }
  handshake_.ring.reset();
  handshake_.arena.reset();
  handshake_.state.reset();
  engram_ring_header header;
  std::memcpy(&header, ring_.data(), sizeof header);
  if (header.magic != ENGRAM_RING_MAGIC || header.version != ENGRAM_PROTOCOL_VERSION ||
      header.session != welcome_.session || std::memcmp(&header.geometry, &geometry, sizeof geometry) != 0) {
    return fail(error, ENGRAM_CLIENT_PROTOCOL, 0, "the ring's header and the daemon's welcome differ");
  }
  if (state().magic != ENGRAM_STATE_MAGIC || state().version != ENGRAM_PROTOCOL_VERSION) {
    return fail(error, ENGRAM_CLIENT_PROTOCOL, 0, "the daemon's state page is malformed");
  }
  if (const int status = is_serving(true, error)) return status;
  return send_mapped(handshake_.socket.get(), error);
}

void Session::free() {
  close();
  drop_reference();
}

void Session::drop_reference() {
  if (references_.fetch_sub(1) == 1) delete this;
}

void Session::abandon_in_child() {
  in_child_.store(true);
  handshake_.socket.reset();
  handshake_.doorbell.reset();
  for (Mapping* mapping : {&ring_, &arena_, &state_map_}) {
    if (!*mapping) continue;
    // The placeholder keeps the addresses from being used for something else, so that a stray use of the parent's rows
    // faults and unmapping later hits nobody.
    void* placeholder = ::mmap(mapping->data(), mapping->bytes(), PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (placeholder != mapping->data()) mapping->forget();
  }
}

void Session::close() {
  if (in_child_.load() || closed_.exchange(true)) return;
  // The descriptor itself stays until the end: another thread may be about to use its number.
  ::shutdown(handshake_.socket.get(), SHUT_RDWR);
  if (!ring_) return;
  for (uint32_t slot = 0; slot < welcome_.geometry.slot_count; ++slot) {
    futex_wake_all(&shared_slot(static_cast<int>(slot)).reply.completion, FutexScope::kShared);
  }
  room_futex_.fetch_add(1);
  futex_wake_all(reinterpret_cast<const uint32_t*>(&room_futex_), FutexScope::kProcess);
}

// The kernel sets the owner's bit when the process dies; before a core dump the daemon itself sets the phase.
bool Session::is_daemon_dead() const {
  return (atomic(state().owner).load(std::memory_order_relaxed) & ENGRAM_OWNER_DIED) != 0 ||
         atomic(state().phase).load(std::memory_order_relaxed) == ENGRAM_PHASE_DEAD;
}

// Whether requests can still be answered. `thorough` asks the kernel about the socket too.
int Session::is_serving(bool thorough, engram_error* error) {
  if (in_child_.load(std::memory_order_relaxed)) {
    return fail(error, ENGRAM_CLIENT_CLOSED, 0, "the session and its tickets belong to the parent process");
  }
  if (closed_.load(std::memory_order_relaxed)) return fail(error, ENGRAM_CLIENT_CLOSED, 0, "the session is closed");
  if (const char* why = lost_.load(std::memory_order_relaxed)) return lost(error, why);
  const char* why = nullptr;
  if (is_daemon_dead()) {
    why = "the daemon died";
  } else if (thorough) {
    pollfd socket{handshake_.socket.get(), POLLRDHUP, 0};
    if (::poll(&socket, 1, 0) > 0 && (socket.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
      why = "the daemon ended the session";
    }
  }
  if (why == nullptr) return 0;
  if (closed_.load()) return fail(error, ENGRAM_CLIENT_CLOSED, 0, "the session is closed");
  lost_.store(why, std::memory_order_relaxed);
  return lost(error, why);
}

int Session::check(engram_error* error) {
  return is_serving(true, error);
}

engram_slot& Session::shared_slot(int slot) const {
  return reinterpret_cast<engram_slot*>(ring_.data() + welcome_.geometry.slots_offset)[slot];
}

uint32_t Session::completion(int slot) const {
  return atomic(shared_slot(slot).reply.completion).load(std::memory_order_acquire);
}

uint64_t Session::ticket_rows(uint32_t row_bytes) const {
  const engram_ring_geometry& geometry = welcome_.geometry;
  const uint64_t by_reply = geometry.max_reply_bytes / std::max<uint32_t>(row_bytes, 1);
  return std::min({by_reply, geometry.ids_bytes / sizeof(int64_t), uint64_t{UINT32_MAX}});
}

void Session::read_usage(engram_session_usage& usage) {
  usage = {};
  if (in_child_.load()) return;
  const std::lock_guard guard(lock_);
  reclaim_zombies();
  usage.open_tickets = welcome_.geometry.slot_count - free_count_ - zombie_count_;
  usage.zombie_tickets = zombie_count_;
  usage.arena_bytes = reply_extents_.used_bytes();
  usage.ids_bytes = ids_extents_.used_bytes();
}

int Session::refresh(engram_error* error) {
  if (const int status = is_serving(true, error)) return status;
  const std::lock_guard guard(catalogue_lock_);
  const int status = request_catalogue(handshake_.socket.get(), kRefreshTimeoutMs, handshake_.catalogue, error);
  if (status == ENGRAM_STATUS_LOST) return is_serving(true, error);
  return status;
}

// ---- submission

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
  if (const int status = check_submission(submission, error)) return -status;
  const int slot = take_slot(submission, wait_ms, error);
  if (slot < 0) return slot;
  const LocalSlot& local = slots_[slot];
  std::memcpy(ring_.data() + welcome_.geometry.ids_offset + local.ids_offset, submission.ids,
              submission.row_count * submission.id_bytes);
  engram_request& request = shared_slot(slot).request;
  request.operation = submission.operation;
  request.handle = submission.layer->handle;
  request.row_count = static_cast<uint32_t>(submission.row_count);
  request.id_bytes = static_cast<uint16_t>(submission.id_bytes);
  request.layout = static_cast<uint16_t>(submission.layout);
  request.ids_offset = local.ids_offset;
  request.reply_offset = local.reply_offset;
  request.request_id = submission.request_id != 0 ? submission.request_id : next_request_id();
  request.part_index = submission.part_index;
  request.part_count = submission.part_count;
  request.total_rows = submission.total_rows != 0 ? submission.total_rows : submission.row_count;
  request.reserved = 0;
  // Taken before the slot is sent: from then on another thread may release it.
  const int64_t ticket = static_cast<int64_t>(local.serial.load(std::memory_order_relaxed) << kSlotBits) | slot;
  send(slot);
  return ticket;
}

// Hands a slot whose request line is written to the daemon, and rings where the worker sleeps.
void Session::send(int slot) {
  engram_slot& shared = shared_slot(slot);
  atomic(shared.waiting).store(0, std::memory_order_relaxed);
  atomic(shared.reply.completion).store(ENGRAM_STATUS_EMPTY, std::memory_order_relaxed);
  auto& block = *reinterpret_cast<engram_submit_block*>(ring_.data() + welcome_.geometry.submit_offset);
  auto* queue = reinterpret_cast<uint32_t*>(&block + 1);
  {
    const std::lock_guard guard(lock_);
    atomic(queue[tail_ & (welcome_.geometry.slot_count - 1)])
        .store(static_cast<uint32_t>(slot), std::memory_order_relaxed);
    ++tail_;
    atomic(block.submit_tail).store(tail_, std::memory_order_seq_cst);
  }
  if (atomic(state().worker_asleep[welcome_.worker]).load(std::memory_order_seq_cst) != 0) {
    const uint64_t one = 1;
    // A full counter (EAGAIN) has rung already.
    [[maybe_unused]] const ssize_t written = ::write(handshake_.doorbell.get(), &one, sizeof one);
  }
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

// ---- release

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

// ---- waiting

int64_t Session::spin_ns(uint64_t row_count) const {
  if (spin_us_ >= 0) return int64_t{spin_us_} * 1000;
  return std::min<int64_t>(500'000, 20'000 + static_cast<int64_t>(row_count) * 100);
}

// Looks at the completion word for a while; returns its last value.
int Session::spin(int slot, int64_t ticket) const {
  const uint32_t& word = shared_slot(slot).reply.completion;
  uint32_t status = atomic(word).load(std::memory_order_acquire);
  const int64_t limit_ns = spin_ns(slots_[slot].row_count);
  if (status != ENGRAM_STATUS_EMPTY || limit_ns == 0) return static_cast<int>(status);
  const int64_t end = monotonic_ns() + limit_ns;
  for (uint32_t turn = 1;; ++turn) {
    spin_pause();
    status = atomic(word).load(std::memory_order_acquire);
    if (status != ENGRAM_STATUS_EMPTY) return static_cast<int>(status);
    if (turn % 16 != 0) continue;
    // The worker may need this very CPU.
    ::sched_yield();
    const bool is_over =
        monotonic_ns() >= end || closed_.load(std::memory_order_relaxed) || slot_of(ticket) < 0 || is_daemon_dead();
    if (is_over) return static_cast<int>(status);
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
  if (status == ENGRAM_STATUS_EMPTY && timeout_ms != 0) status = static_cast<uint32_t>(spin(slot, ticket));
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
        return nullptr;
      }
      const int64_t left = deadline == INT64_MAX ? kSliceNs : deadline - monotonic_ns();
      if (left <= 0) {
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
        fail(error, ENGRAM_CLIENT_AGAIN, EINTR, "interrupted by a signal");
        return nullptr;
      }
    }
  }
  if (slot_of(ticket) < 0) {
    fail(error, ENGRAM_CLIENT_CLOSED, 0, "the ticket was released by another thread");
    return nullptr;
  }
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
      fail(error, status, error_number, "the daemon refused the request as malformed (field %" PRIu64 ")", position);
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

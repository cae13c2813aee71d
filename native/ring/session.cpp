// The life of a session: connecting, mapping, its end, and what a forked child does with it.
#include "ring/session.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "ring/error.h"
#include "ring/fork_registry.h"
#include "ring/session_detail.h"

namespace engram {
namespace {

constexpr uint32_t kRefreshTimeoutMs = 5000;

int lost(engram_error* error, const char* why) {
  return fail(error, ENGRAM_STATUS_LOST, 0, "%s", why);
}

}  // namespace

Session* Session::connect(const char* path, const engram_connect_options& options, engram_error* error) {
  auto* session = new Session(options);
  if (session->open(path, options, error) == 0) return session;
  session->free();
  return nullptr;
}

// Registered before it has a descriptor, so that a fork at any time finds them all.
Session::Session(const engram_connect_options& options) : spin_us_(options.spin_us), flags_(options.flags) {
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
  const bool writable = (flags_ & ENGRAM_CONNECT_WRITABLE_ARENA) != 0;
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (ring_) arena_ = Mapping::map(handshake_.arena.get(), geometry.arena_bytes, protection, MAP_SHARED | MAP_POPULATE);
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
  if (in_child_.load()) {
    // The thread is the parent's; destroying its condition variable here would wait for it.
    static_cast<void>(watchdog_.release());
  } else {
    // Before the last reference goes, which the thread itself may hold for a moment.
    watchdog_.reset();
  }
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

void Session::read_memory(engram_session_memory& memory) const {
  memory = {};
  memory.ring = ring_.data();
  memory.arena = arena_.data();
  memory.ring_bytes = ring_.bytes();
  memory.arena_bytes = arena_.bytes();
  memory.arena_is_writable = (flags_ & ENGRAM_CONNECT_WRITABLE_ARENA) != 0 ? 1 : 0;
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
  const int status =
      requests_.request_catalogue(handshake_.socket.get(), kRefreshTimeoutMs, handshake_.catalogue, error);
  if (status != ENGRAM_STATUS_LOST) return status;
  const int why = is_serving(true, error);  // says more, where it has seen the end already
  return why != 0 ? why : status;
}

int Session::map_layer(uint32_t handle, engram_map& map, UniqueFd& file, engram_error* error) {
  if (const int status = is_serving(true, error)) return status;
  const std::lock_guard guard(catalogue_lock_);
  return requests_.request_map(handshake_.socket.get(), kRefreshTimeoutMs, handle, map, file, error);
}

// An answer that came after its asker had given up; with whatever this session does next.
void Session::take_late_answer() {
  const std::unique_lock guard(catalogue_lock_, std::try_to_lock);
  if (guard) requests_.take_late_answer(handshake_.socket.get());
}

int Session::unmap_layer(uint32_t handle, engram_error* error) {
  if (const int status = is_serving(true, error)) return status;
  const std::lock_guard guard(catalogue_lock_);
  return requests_.send_unmap(handshake_.socket.get(), kRefreshTimeoutMs, handle, error);
}

}  // namespace engram

#include "engine/ring_session.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "common/machine_page.h"
#include "ring/futex.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace engram {
namespace {

constexpr std::uint64_t kPartAlignment = 4096;

// A memfd of the given size, mapped for writing and populated.
bool make_memory(const char* name, std::uint64_t bytes, UniqueFd& descriptor, Mapping& mapping, std::string& error) {
  descriptor.reset(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!descriptor && errno == EINVAL) descriptor.reset(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor || ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
    error = std::string(name) + ": no shared memory of " + std::to_string(bytes) + " bytes: " + std::strerror(errno);
    return false;
  }
  mapping = Mapping::map(descriptor.get(), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE);
  if (!mapping) {
    error = std::string(name) + ": cannot map " + std::to_string(bytes) + " bytes: " + std::strerror(errno);
    return false;
  }
  madvise(mapping.data(), bytes, MADV_DONTDUMP);
  madvise(mapping.data(), bytes, MADV_DONTFORK);
  return true;
}

}  // namespace

engram_ring_geometry RingSession::plan(const Options& options, std::uint64_t machine_page_bytes) {
  engram_ring_geometry geometry{};
  geometry.slot_count = options.slot_count;
  geometry.stream_slot_count = options.stream_slot_count;
  geometry.arena_bytes = options.arena_bytes / machine_page_bytes * machine_page_bytes;
  geometry.max_reply_bytes = geometry.arena_bytes / 4;
  geometry.submit_offset = kPartAlignment;
  geometry.slots_offset =
      round_up(geometry.submit_offset + sizeof(engram_submit_block) + options.slot_count * sizeof(std::uint32_t),
               kPartAlignment);
  const std::uint64_t slots = std::uint64_t{options.slot_count} + options.stream_slot_count;
  geometry.ids_offset = round_up(geometry.slots_offset + slots * sizeof(engram_slot), kPartAlignment);
  geometry.ring_bytes = round_up(geometry.ids_offset + options.ids_bytes, machine_page_bytes);
  geometry.ids_bytes = geometry.ring_bytes - geometry.ids_offset;
  return geometry;
}

RingSession::RingSession(const Options& options, const engram_ring_geometry& geometry)
    : id(options.id),
      worker(options.worker),
      counters(std::make_shared<SessionCounters>()),
      geometry_(geometry),
      busy_rows_(options.slot_count + options.stream_slot_count),
      writable_arena_(options.writable_arena),
      stream_uses_(options.stream_slot_count),
      memory_(options.memory) {
  counters->session = options.id;
  counters->pid = options.pid;
  counters->uid = options.uid;
  counters->since_ns = static_cast<std::uint64_t>(monotonic_ns());
  memory_->sessions.fetch_add(1);
  memory_->bytes.fetch_add(memory_bytes());
}

RingSession::~RingSession() {
  ring_ = {};
  arena_ = {};
  memory_->bytes.fetch_sub(memory_bytes());
  memory_->sessions.fetch_sub(1);
}

std::unique_ptr<RingSession> RingSession::create(const Options& options, std::string& error) {
  std::unique_ptr<RingSession> session(new RingSession(options, plan(options, machine_page_bytes())));
  const engram_ring_geometry& geometry = session->geometry_;
  if (!make_memory("engram-ring", geometry.ring_bytes, session->ring_descriptor_, session->ring_, error) ||
      !make_memory("engram-arena", geometry.arena_bytes, session->arena_descriptor_, session->arena_, error)) {
    return nullptr;
  }
  // The arena's seals go on before its descriptor leaves the daemon: a mapping made earlier could become writable.
  constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  const int arena_seals = options.writable_arena ? kSizeSeals : kSizeSeals | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  if (fcntl(session->ring_descriptor_.get(), F_ADD_SEALS, kSizeSeals) != 0 ||
      fcntl(session->arena_descriptor_.get(), F_ADD_SEALS, arena_seals) != 0) {
    error = std::string("cannot seal shared memory: ") + std::strerror(errno);
    return nullptr;
  }
  session->doorbell_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!session->doorbell_) {
    error = std::string("eventfd: ") + std::strerror(errno);
    return nullptr;
  }
  engram_ring_header header{};
  header.magic = ENGRAM_RING_MAGIC;
  header.version = ENGRAM_PROTOCOL_VERSION;
  header.session = options.id;
  header.geometry = geometry;
  std::memcpy(session->ring_.data(), &header, sizeof header);
  return session;
}

bool RingSession::seal() {
  constexpr int kLastSeals = F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  return fcntl(ring_descriptor_.get(), F_ADD_SEALS, kLastSeals) == 0 &&
         (!writable_arena_ || fcntl(arena_descriptor_.get(), F_ADD_SEALS, kLastSeals) == 0);
}

engram_slot* RingSession::slot_at(std::uint32_t slot) const {
  return reinterpret_cast<engram_slot*>(ring_.data() + geometry_.slots_offset) + slot;
}

std::uint32_t RingSession::tail() const {
  auto* block = reinterpret_cast<engram_submit_block*>(ring_.data() + geometry_.submit_offset);
  return std::atomic_ref(block->submit_tail).load(std::memory_order_seq_cst);
}

RingSession::Take RingSession::take(std::uint32_t* slot, engram_request* request) {
  auto* block = reinterpret_cast<engram_submit_block*>(ring_.data() + geometry_.submit_offset);
  auto* entries = reinterpret_cast<std::uint32_t*>(block + 1);
  const std::uint32_t number =
      std::atomic_ref(entries[head_ & (geometry_.slot_count - 1)]).load(std::memory_order_relaxed);
  if (number >= geometry_.slot_count || busy_rows_[number] != 0) return Take::violation;

  *request = read_request(number);
  if (!may_hold(request->row_count)) return Take::later;
  ++head_;
  *slot = number;
  hold(number, request->row_count);
  return Take::request;
}

engram_request RingSession::read_request(std::uint32_t slot) const {
  std::uint64_t words[sizeof(engram_request) / sizeof(std::uint64_t)];
  auto* line = reinterpret_cast<std::uint64_t*>(&slot_at(slot)->request);
  for (std::size_t i = 0; i < std::size(words); ++i) {
    words[i] = std::atomic_ref(line[i]).load(std::memory_order_relaxed);
  }
  engram_request request;
  std::memcpy(&request, words, sizeof request);
  return request;
}

// Private copies of ids are bounded by what the ids area can hold; ranges of a correct client never overlap.
bool RingSession::may_hold(std::uint64_t rows) const {
  return rows_held_ == 0 || rows_held_ + rows <= geometry_.ids_bytes / sizeof(std::uint32_t);
}

void RingSession::hold(std::uint32_t slot, std::uint64_t rows) {
  const std::uint64_t row_limit = geometry_.ids_bytes / sizeof(std::uint32_t);
  busy_rows_[slot] = static_cast<std::uint32_t>(rows <= row_limit ? rows : 0) + 1;
  rows_held_ += busy_rows_[slot] - 1;
  counters->in_flight.store(in_flight() + 1, std::memory_order_relaxed);
}

bool RingSession::has_stream_doorbell() const {
  for (std::uint32_t index = 0; index < geometry_.stream_slot_count; ++index) {
    const std::uint32_t slot = geometry_.slot_count + index;
    // While reads of an earlier use are under way nothing can be done about another ring.
    if (busy_rows_[slot] == 0 && std::atomic_ref(slot_at(slot)->doorbell).load(std::memory_order_relaxed) != 0) {
      return true;
    }
  }
  return false;
}

RingSession::StreamTake RingSession::take_stream(std::uint32_t index, std::uint32_t* slot, engram_request* request) {
  const std::uint32_t number = geometry_.slot_count + index;
  engram_slot* shared = slot_at(number);
  const std::uint32_t rings = std::atomic_ref(shared->doorbell).load(std::memory_order_acquire);
  if (rings == 0) return StreamTake::nothing;
  if (rings != 1 || busy_rows_[number] != 0) return StreamTake::violation;
  *request = read_request(number);
  if (!may_hold(request->row_count)) return StreamTake::nothing;  // it goes on ringing
  // Before anything is answered: the next use may ring again as soon as this one's completion is there.
  std::atomic_ref(shared->doorbell).store(0, std::memory_order_seq_cst);
  *slot = number;
  hold(number, request->row_count);
  std::atomic_ref(shared->reply.stream_taken).store(++stream_uses_[index].taken, std::memory_order_relaxed);
  return StreamTake::request;
}

void RingSession::report_rows_ready(std::uint32_t slot, std::uint32_t rows) {
  std::atomic_ref(slot_at(slot)->reply.rows_ready).store(rows, std::memory_order_release);
}

void RingSession::complete(std::uint32_t slot, const engram_failure& outcome, std::uint64_t hits,
                           std::uint64_t misses) {
  rows_held_ -= busy_rows_[slot] - 1;
  busy_rows_[slot] = 0;
  counters->in_flight.store(in_flight() - 1, std::memory_order_relaxed);
  engram_slot* shared = slot_at(slot);
  engram_reply& reply = shared->reply;
  std::atomic_ref(reply.error_number).store(outcome.error_number, std::memory_order_relaxed);
  std::atomic_ref(reply.position).store(outcome.position, std::memory_order_relaxed);
  std::atomic_ref(reply.row_id).store(outcome.row_id, std::memory_order_relaxed);
  std::atomic_ref(reply.page).store(outcome.page, std::memory_order_relaxed);
  std::atomic_ref(reply.hits).store(static_cast<std::uint32_t>(hits), std::memory_order_relaxed);
  std::atomic_ref(reply.misses).store(static_cast<std::uint32_t>(misses), std::memory_order_relaxed);
  if (slot >= geometry_.slot_count) {
    StreamUse& use = stream_uses_[slot - geometry_.slot_count];
    use.failed += outcome.status != ENGRAM_STATUS_OK ? 1 : 0;
    std::atomic_ref(reply.stream_completed).store(++use.completed, std::memory_order_relaxed);
    std::atomic_ref(reply.stream_failed).store(use.failed, std::memory_order_relaxed);
  }
  // Last: from here on the slot is the client's. The load must not pass the store (a sleeper would be missed).
  std::atomic_ref(reply.completion).store(outcome.status, std::memory_order_seq_cst);
  if (std::atomic_ref(shared->waiting).load(std::memory_order_seq_cst) != 0) futex_wake_one(&reply.completion);
}

}  // namespace engram

// The daemon's side of one client's ring: the memory, its own head and its own list of busy slots. What the client can
// write is read once, checked on the private copy, and never trusted again (docs/protocol.md).
//
// Made by any thread; from start on touched by one worker only, except for the counters.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/mapping.h"
#include "common/unique_fd.h"
#include "engine/counters.h"
#include "engram/engine.h"

namespace engram {

// Starts and sizes of split requests that have parts outstanding, for statistics only.
struct SplitRequest {
  std::uint64_t request_id = 0;
  std::uint64_t taken_ns = 0;
  std::uint32_t parts_done = 0;
  bool failed = false;
};

// What statistics tell of a session; outlives it.
struct SessionCounters {
  std::uint64_t session = 0;
  std::int64_t pid = 0;
  std::uint32_t uid = 0;
  std::uint64_t since_ns = 0;
  Counter requests;
  Counter rows;
  std::atomic<std::uint32_t> in_flight{0};  // requests taken and not completed
};

// Sessions' shared memory in all; sessions take themselves out when their memory is gone.
struct SessionMemory {
  std::atomic<std::uint64_t> sessions{0};
  std::atomic<std::uint64_t> bytes{0};
};

class RingSession {
 public:
  struct Options {
    std::uint64_t id = 0;
    std::uint32_t worker = 0;
    std::int64_t pid = 0;
    std::uint32_t uid = 0;
    std::uint64_t arena_bytes = 0;
    std::uint64_t ids_bytes = 0;
    std::uint32_t slot_count = 0;
    std::uint32_t stream_slot_count = 0;
    bool writable_arena = false;      // the client may map the arena for writing, until it has said that it is mapped
    SessionMemory* memory = nullptr;  // outlives the session
  };

  // Where the parts lie. Ring and arena are whole pages of the machine, as the kernel maps, counts and pins them (the
  // arena rounded down: it is a limit). Pages of a machine have at least 4 KiB and at most the least arena.
  static engram_ring_geometry plan(const Options& options, std::uint64_t machine_page_bytes);
  // Makes and populates ring and arena and seals the arena (a writable one: with seal()). On failure nullptr, and
  // `error` says why.
  static std::unique_ptr<RingSession> create(const Options& options, std::string& error);
  ~RingSession();
  RingSession(const RingSession&) = delete;
  RingSession& operator=(const RingSession&) = delete;

  // Adds the last seals, after the client has mapped the ring. False where that fails.
  bool seal();

  const engram_ring_geometry& geometry() const { return geometry_; }
  int ring_descriptor() const { return ring_descriptor_.get(); }
  int arena_descriptor() const { return arena_descriptor_.get(); }
  int doorbell() const { return doorbell_.get(); }
  std::uint64_t memory_bytes() const { return geometry_.ring_bytes + geometry_.arena_bytes; }

  // Worker: the submit tail, one load.
  std::uint32_t tail() const;
  // Worker: the number of slots submitted and not taken; more than slot_count is a violation.
  std::uint32_t submitted(std::uint32_t tail) const { return tail - head_; }

  enum class Take { request, later, violation };
  // Worker: takes the next submitted slot: copies its request line. `later`: the session holds as many ids as it may.
  Take take(std::uint32_t* slot, engram_request* request);
  // Worker: whether a stream slot's doorbell may ring (docs/protocol.md, GPU streams).
  bool has_stream_doorbell() const;
  // Worker: takes stream slot number `index` where its doorbell rings; `nothing` where it does not.
  enum class StreamTake { nothing, request, violation };
  StreamTake take_stream(std::uint32_t index, std::uint32_t* slot, engram_request* request);
  // Worker: the reply's first `rows` rows are there; nobody is woken.
  void report_rows_ready(std::uint32_t slot, std::uint32_t rows);
  // Worker: writes the answer and wakes one waiter. The slot is the client's again.
  void complete(std::uint32_t slot, const engram_failure& outcome, std::uint64_t hits, std::uint64_t misses);

  const std::uint8_t* ids(std::uint64_t offset) const {
    return reinterpret_cast<const std::uint8_t*>(ring_.data()) + geometry_.ids_offset + offset;
  }
  std::uint8_t* arena(std::uint64_t offset) const { return reinterpret_cast<std::uint8_t*>(arena_.data()) + offset; }

  std::uint32_t in_flight() const { return counters->in_flight.load(std::memory_order_relaxed); }

  const std::uint64_t id;
  const std::uint32_t worker;
  const std::shared_ptr<SessionCounters> counters;  // written by the worker

  bool closing = false;                      // worker: no new requests; freed when in_flight is 0
  std::int64_t armed_until_ns = 0;           // worker: stream doorbells are looked at until then
  bool held_back = false;                    // worker: the next request must wait for completions of this session
  std::vector<SplitRequest> split_requests;  // worker

 private:
  RingSession(const Options& options, const engram_ring_geometry& geometry);
  engram_slot* slot_at(std::uint32_t slot) const;
  engram_request read_request(std::uint32_t slot) const;
  bool may_hold(std::uint64_t rows) const;
  void hold(std::uint32_t slot, std::uint64_t rows);

  engram_ring_geometry geometry_;
  UniqueFd ring_descriptor_;
  UniqueFd arena_descriptor_;
  UniqueFd doorbell_;
  Mapping ring_;
  Mapping arena_;
  std::uint32_t head_ = 0;
  std::vector<std::uint32_t> busy_rows_;  // by slot: rows of the request the daemon holds + 1, or 0
  std::uint64_t rows_held_ = 0;
  bool writable_arena_;
  struct StreamUse {
    std::uint64_t taken = 0;
    std::uint64_t completed = 0;
    std::uint64_t failed = 0;
  };
  std::vector<StreamUse> stream_uses_;  // by stream slot
  SessionMemory* memory_;
};

}  // namespace engram

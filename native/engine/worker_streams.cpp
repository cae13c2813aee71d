// Requests of GPU streams: slots whose doorbell is a word in the ring, since a stream cannot move a tail.
#include <sys/prctl.h>

#include <algorithm>

#include "engine/worker.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint64_t kLongestLeaseMs = 60'000;

}  // namespace

// Takes each stream slot whose doorbell rings; true where there was one.
bool Worker::take_streams(RingSession& session) {
  bool worked = false;
  for (std::uint32_t index = 0; index < session.geometry().stream_slot_count; ++index) {
    std::uint32_t slot = 0;
    engram_request request;
    switch (session.take_stream(index, &slot, &request)) {
      case RingSession::StreamTake::nothing:
        continue;
      case RingSession::StreamTake::violation:
        return end_session_of_violator(session, "a stream slot's doorbell is no doorbell, or rings while in use");
      case RingSession::StreamTake::request:
        break;
    }
    worked = true;
    stream_poll_.rang();
    open_requests_.fetch_add(1, std::memory_order_seq_cst);
    begin_ring_request(session, slot, request);
    if (session.closing) break;
  }
  return worked;
}

// The client's lease on this worker's attention: `total_rows` milliseconds.
void Worker::arm_streams(RingSession& session, std::uint32_t slot, const engram_request& request) {
  engram_failure outcome{};
  const bool good = session.geometry().stream_slot_count != 0 && request.row_count == 0 && request.flags == 0 &&
                    request.reserved == 0;
  outcome.status = good ? ENGRAM_STATUS_OK : ENGRAM_STATUS_BAD_REQUEST;
  if (shared_.stopping.load(std::memory_order_seq_cst)) outcome.status = ENGRAM_STATUS_STOPPING;
  if (outcome.status == ENGRAM_STATUS_OK) {
    const std::uint64_t lease_ms = std::min(request.total_rows, kLongestLeaseMs);
    session.armed_until_ns = monotonic_ns() + static_cast<std::int64_t>(lease_ms) * 1'000'000;
    stream_poll_.rang();
    // The kernel's default slack of 50 us would lengthen each sleep between two looks.
    prctl(PR_SET_TIMERSLACK, 1'000UL);
  }
  session.complete(slot, outcome, 0, 0);
  open_requests_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace engram

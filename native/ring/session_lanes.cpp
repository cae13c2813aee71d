// Lanes of a session: slots that a GPU stream uses by itself. The host writes a lane's request line once; everything
// else is done by the stream, and watched over by the StreamWatchdog.
#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstddef>

#include "ring/error.h"
#include "ring/session.h"

namespace engram {

int Session::open_lane(const engram_layer& layer, uint32_t row_count, uint32_t id_bytes, uint32_t layout,
                       uint32_t deadline_ms, engram_lane& lane, engram_error* error) {
  lane = {};
  if (const int status = is_serving(true, error)) return status;
  const engram_ring_geometry& geometry = welcome_.geometry;
  if (geometry.stream_slot_count == 0) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, ENOTSUP, "the session has no slots for GPU streams: %s",
                (flags_ & ENGRAM_CONNECT_STREAM_SLOTS) != 0 ? "this daemon offers none"
                                                            : "connect with ENGRAM_CONNECT_STREAM_SLOTS");
  }
  Submission submission{};
  submission.layer = &layer;
  submission.ids = ring_.data();
  submission.row_count = row_count;
  submission.id_bytes = id_bytes;
  submission.layout = layout;
  if (const int status = check_submission(submission, error)) return status;
  if (deadline_ms == 0) return fail(error, ENGRAM_CLIENT_ARGUMENT, EINVAL, "a lane needs a deadline");

  const std::lock_guard guard(lock_);
  const auto end = lane_taken_.begin() + geometry.stream_slot_count;
  const auto taken = std::find(lane_taken_.begin(), end, false);
  if (taken == end) {
    return fail(error, ENGRAM_STATUS_BUSY, 0, "all %u stream slots of the session are in use",
                geometry.stream_slot_count);
  }
  const uint64_t ids_bytes = uint64_t{row_count} * id_bytes;
  const uint64_t rows_bytes = uint64_t{row_count} * layer.row_bytes;
  const auto ids_offset = ids_extents_.take(ids_bytes);
  const auto rows_offset = ids_offset ? reply_extents_.take(rows_bytes) : std::nullopt;
  if (!rows_offset) {
    if (ids_offset) ids_extents_.give_back(*ids_offset, ids_bytes);
    return fail(error, ENGRAM_STATUS_BUSY, 0, "no room for a lane of %u rows (%" PRIu64 " bytes)", row_count,
                rows_bytes);
  }
  if (watchdog_ == nullptr) watchdog_ = std::make_unique<StreamWatchdog>(*this);
  const auto index = static_cast<uint32_t>(taken - lane_taken_.begin());
  lane_taken_[index] = true;

  lane.slot = geometry.slot_count + index;
  lane.row_count = row_count;
  lane.id_bytes = id_bytes;
  lane.layout = layout;
  const uint64_t slot_offset = geometry.slots_offset + uint64_t{lane.slot} * sizeof(engram_slot);
  lane.ids_offset = geometry.ids_offset + *ids_offset;
  lane.reply_line_offset = slot_offset + offsetof(engram_slot, reply);
  lane.completion_offset = lane.reply_line_offset + offsetof(engram_reply, completion);
  lane.doorbell_offset = slot_offset + offsetof(engram_slot, doorbell);
  lane.rows_offset = *rows_offset;
  lane.rows_bytes = rows_bytes;

  engram_slot& slot = shared_slot(static_cast<int>(lane.slot));
  slot.request = {};
  slot.request.operation = ENGRAM_OPERATION_FETCH;
  slot.request.handle = layer.handle;
  slot.request.row_count = row_count;
  slot.request.id_bytes = static_cast<uint16_t>(id_bytes);
  slot.request.layout = static_cast<uint16_t>(layout);
  slot.request.ids_offset = *ids_offset;
  slot.request.reply_offset = *rows_offset;
  slot.request.request_id = next_request_id();
  slot.request.part_count = 1;
  slot.request.total_rows = row_count;
  watchdog_->watch(&slot, deadline_ms);
  return 0;
}

void Session::close_lane(const engram_lane& lane) {
  if (in_child_.load()) return;
  const std::lock_guard guard(lock_);
  const uint32_t index = lane.slot - welcome_.geometry.slot_count;
  if (index >= welcome_.geometry.stream_slot_count || !lane_taken_[index]) return;
  if (watchdog_ == nullptr) return;  // the session was freed; nothing is handed out any more
  // A slot that is in use or lost keeps its place until the session's end: the daemon may still write there.
  if (!watchdog_->unwatch(&shared_slot(static_cast<int>(lane.slot)))) return;
  lane_taken_[index] = false;
  ids_extents_.give_back(lane.ids_offset - welcome_.geometry.ids_offset, uint64_t{lane.row_count} * lane.id_bytes);
  reply_extents_.give_back(lane.rows_offset, lane.rows_bytes);
}

// The watchdog's thread: asks the worker to look at the stream slots for a while. Best effort: where no slot is free
// the caller tries again, and a ringing doorbell wakes a sleeping worker meanwhile.
bool Session::arm_streams(uint32_t lease_ms) {
  static const engram_layer kNoLayer{};
  Submission submission{};
  submission.layer = &kNoLayer;
  submission.operation = ENGRAM_OPERATION_ARM_STREAMS;
  int slot;
  {
    const std::lock_guard guard(lock_);
    slot = try_take_slot(submission);
  }
  if (slot < 0) return false;
  engram_request& request = shared_slot(slot).request;
  request = {};
  request.operation = ENGRAM_OPERATION_ARM_STREAMS;
  request.part_count = 1;
  request.total_rows = lease_ms;
  const int64_t ticket = ticket_of(slot);
  send(slot);
  release(ticket);
  return true;
}

}  // namespace engram

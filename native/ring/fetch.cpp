#include "ring/fetch.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "ring/error.h"
#include "ring/futex.h"
#include "ring/session.h"

namespace engram {
namespace {

// A request that fits one ticket stays whole. What does not is cut small enough that a reply stays in the CPU's cache
// between the daemon's store and the copy here, and that three of them overlap.
constexpr uint64_t kPartBytes = 2 << 20;
// From so many rows on a reply is copied as it comes; the daemon reports about every 512 rows.
constexpr uint64_t kEarlyCopyRows = 1024;

template <typename Id>
int64_t find_bad(const Id* ids, uint64_t count, uint64_t rows) {
  using Unsigned = std::make_unsigned_t<Id>;
  // -1 .. rows - 1 become 0 .. rows. What is above the type's own range cannot occur.
  const auto limit = static_cast<Unsigned>(std::min<uint64_t>(rows, uint64_t{1} << (8 * sizeof(Id) - 1)));
  constexpr uint64_t kBlock = 1024;
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const uint64_t end = std::min(count, begin + kBlock);
    bool bad = false;
    for (uint64_t i = begin; i < end; ++i) bad |= static_cast<Unsigned>(static_cast<Unsigned>(ids[i]) + 1) > limit;
    if (!bad) continue;
    for (uint64_t i = begin; i < end; ++i) {
      if (static_cast<Unsigned>(static_cast<Unsigned>(ids[i]) + 1) > limit) return static_cast<int64_t>(i);
    }
  }
  return -1;
}

int64_t id_at(const engram_fetch& fetch, uint64_t position) {
  return fetch.id_bytes == 4 ? static_cast<const int32_t*>(fetch.ids)[position]
                             : static_cast<const int64_t*>(fetch.ids)[position];
}

int begin(Session& session, engram_fetch& fetch, engram_error* error) {
  const bool has_rows = fetch.operation == ENGRAM_OPERATION_FETCH;
  if (fetch.layer == nullptr || fetch.ids == nullptr || (fetch.id_bytes != 4 && fetch.id_bytes != 8) ||
      (!has_rows && fetch.operation != ENGRAM_OPERATION_PREFETCH) || (has_rows && fetch.rows == nullptr) ||
      (has_rows && fetch.layout == ENGRAM_LAYOUT_SPLIT && fetch.scales == nullptr)) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, EINVAL,
                "a fetch needs a layer, ids of 4 or 8 bytes and memory for rows");
  }
  const uint64_t most = session.ticket_rows(fetch.layer->row_bytes);
  if (most == 0) {
    return fail(error, ENGRAM_CLIENT_ARGUMENT, E2BIG, "a row of %u bytes is larger than the session's replies",
                fetch.layer->row_bytes);
  }
  fetch.part_rows = fetch.row_count;
  if (fetch.row_count > most) {
    fetch.part_rows = std::min(most, std::max<uint64_t>(1, kPartBytes / fetch.layer->row_bytes));
    // A bad id refuses the whole, so all are looked at before the first part leaves.
    const int64_t bad = find_bad_id(fetch.ids, fetch.id_bytes, fetch.row_count, fetch.layer->rows);
    if (bad >= 0) {
      const int64_t id = id_at(fetch, static_cast<uint64_t>(bad));
      fail(error, ENGRAM_STATUS_ROW_ID, 0, "row id %" PRId64 " at position %" PRId64 " is outside the table", id, bad);
      if (error != nullptr) {
        error->position = static_cast<uint64_t>(bad);
        error->row_id = id;
      }
      return ENGRAM_STATUS_ROW_ID;
    }
  }
  const uint64_t parts = (fetch.row_count + fetch.part_rows - 1) / fetch.part_rows;
  if (parts > UINT32_MAX) return fail(error, ENGRAM_CLIENT_ARGUMENT, E2BIG, "the fetch has too many rows");
  fetch.part_count = static_cast<uint32_t>(parts);
  fetch.parts_submitted = 0;
  fetch.parts_done = 0;
  fetch.request_id = session.next_request_id();
  fetch.started = 1;
  return 0;
}

uint64_t rows_of_part(const engram_fetch& fetch, uint32_t part) {
  return std::min(fetch.part_rows, fetch.row_count - part * fetch.part_rows);
}

// Rows begin .. end - 1 of the part.
void copy_out(const engram_fetch& fetch, uint32_t part, const void* reply, uint64_t begin, uint64_t end) {
  const uint64_t first = part * fetch.part_rows + begin;
  const uint64_t count = end - begin;
  const uint64_t row_bytes = fetch.layer->row_bytes;
  const auto* source = static_cast<const std::byte*>(reply);
  auto* rows = static_cast<std::byte*>(fetch.rows);
  if (fetch.layout == ENGRAM_LAYOUT_PACKED) {
    std::memcpy(rows + first * row_bytes, source + begin * row_bytes, count * row_bytes);
    return;
  }
  const uint64_t value_bytes = fetch.layer->value_bytes;
  const uint64_t scale_bytes = row_bytes - value_bytes;
  const std::byte* scales = source + rows_of_part(fetch, part) * value_bytes;
  std::memcpy(rows + first * value_bytes, source + begin * value_bytes, count * value_bytes);
  std::memcpy(static_cast<std::byte*>(fetch.scales) + first * scale_bytes, scales + begin * scale_bytes,
              count * scale_bytes);
}

// Copies rows while the daemon is at later ones of the same reply, and returns how many: the time of the copy passes
// beside the daemon's. After an error they mean nothing.
uint64_t copy_what_is_ready(Session& session, const engram_fetch& fetch, int64_t ticket) {
  uint64_t copied = 0;
  for (;;) {
    const RowsReady ready = session.spin_for_rows(ticket, copied);
    if (ready.row_count == copied) return copied;
    const int64_t began_ns = monotonic_ns();
    copy_out(fetch, fetch.parts_done, ready.reply, copied, ready.row_count);
    session.totals().add_copy(monotonic_ns() - began_ns);
    copied = ready.row_count;
  }
}

bool is_resumable(int status) {
  return status == ENGRAM_STATUS_TIMEOUT || status == ENGRAM_CLIENT_AGAIN;
}

}  // namespace

int64_t find_bad_id(const void* ids, uint32_t id_bytes, uint64_t count, uint64_t rows) {
  return id_bytes == 4 ? find_bad(static_cast<const int32_t*>(ids), count, rows)
                       : find_bad(static_cast<const int64_t*>(ids), count, rows);
}

void cancel_fetch(Session& session, engram_fetch& fetch) {
  if (fetch.started == 0) return;
  for (; fetch.parts_done < fetch.parts_submitted; ++fetch.parts_done) {
    session.release(fetch.tickets[fetch.parts_done % ENGRAM_CLIENT_FETCH_DEPTH]);
  }
  fetch.started = 0;
}

int run_fetch(Session& session, engram_fetch& fetch, int32_t timeout_ms, engram_error* error) {
  if (fetch.row_count == 0) return 0;
  if (fetch.started == 0) {
    if (const int status = begin(session, fetch, error)) return status;
  }
  const int64_t deadline = timeout_ms < 0 ? INT64_MAX : monotonic_ns() + int64_t{timeout_ms} * 1'000'000;
  const auto left_ms = [&]() -> int32_t {
    if (deadline == INT64_MAX) return -1;
    return static_cast<int32_t>(std::max<int64_t>(0, (deadline - monotonic_ns() + 999'999) / 1'000'000));
  };
  const auto end = [&](int status) {
    if (!is_resumable(status)) cancel_fetch(session, fetch);
    return status;
  };
  const bool copies_early =
      fetch.operation == ENGRAM_OPERATION_FETCH && session.spins() && fetch.row_count >= kEarlyCopyRows;
  while (fetch.parts_done < fetch.part_count) {
    while (fetch.parts_submitted < fetch.part_count &&
           fetch.parts_submitted - fetch.parts_done < ENGRAM_CLIENT_FETCH_DEPTH) {
      // Waits for room only while it holds none itself: so it can never be one of those that wait for each other.
      const bool holds_none = fetch.parts_submitted == fetch.parts_done;
      Submission part{};
      part.layer = fetch.layer;
      part.ids = static_cast<const std::byte*>(fetch.ids) + fetch.parts_submitted * fetch.part_rows * fetch.id_bytes;
      part.row_count = rows_of_part(fetch, fetch.parts_submitted);
      part.id_bytes = fetch.id_bytes;
      part.layout = fetch.layout;
      part.operation = fetch.operation;
      part.request_id = fetch.request_id;
      part.part_index = fetch.parts_submitted;
      part.part_count = fetch.part_count;
      part.total_rows = fetch.row_count;
      part.wants_progress = copies_early;
      // At least a look: 0 would mean "busy at once".
      const int32_t wait_ms = left_ms() == 0 ? 1 : left_ms();
      const int64_t ticket = session.submit(part, holds_none ? wait_ms : 0, error);
      if (ticket == -ENGRAM_STATUS_BUSY && !holds_none) break;
      if (ticket < 0) return end(static_cast<int>(-ticket));
      fetch.tickets[fetch.parts_submitted % ENGRAM_CLIENT_FETCH_DEPTH] = ticket;
      ++fetch.parts_submitted;
    }
    const int64_t ticket = fetch.tickets[fetch.parts_done % ENGRAM_CLIENT_FETCH_DEPTH];
    const uint64_t copied = copies_early ? copy_what_is_ready(session, fetch, ticket) : 0;
    engram_error own_error;
    engram_error* detail = error != nullptr ? error : &own_error;
    const void* reply = session.wait(ticket, left_ms(), detail);
    if (reply == nullptr) {
      detail->position += fetch.parts_done * fetch.part_rows;
      return end(detail->status);
    }
    if (fetch.operation == ENGRAM_OPERATION_FETCH) {
      const int64_t began_ns = monotonic_ns();
      copy_out(fetch, fetch.parts_done, reply, copied, rows_of_part(fetch, fetch.parts_done));
      session.totals().add_copy(monotonic_ns() - began_ns);
    }
    session.release(ticket);
    ++fetch.parts_done;
  }
  fetch.started = 0;
  return 0;
}

}  // namespace engram

// One request on its way through a worker: private copies of everything the client wrote, and how far it has come.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/copy_row.h"
#include "engine/layer.h"
#include "engine/local_request.h"
#include "engine/miss_pages.h"
#include "engram/engine.h"

namespace engram {

class RingSession;

// A batch whose look-up several workers share (worker_shared.cpp).
struct SharedLookUp {
  std::uint32_t block_count = 0;
  std::atomic<std::uint32_t> next_block{0};
  std::atomic<std::uint32_t> helpers{0};  // raised under the lock, while the batch is published
  std::atomic<std::uint64_t> rows_zero{0};
  std::atomic<std::uint32_t> first_bad{UINT32_MAX};  // the first position with an id outside the table
  bool withdrawn = false;                            // the batch's own worker
};

struct Batch {
  Layer* layer = nullptr;                      // in use by this batch from begin_batch on
  std::shared_ptr<const Placement> placement;  // of the layer when the batch began
  RingSession* session = nullptr;  // null for local requests, and for a prefetch, whose slot is completed at once
  std::shared_ptr<LocalRequest> local;
  std::uint64_t owner = 0;  // the session's id; 0 for local requests. Owners are served in turn
  std::uint32_t slot = 0;
  engram_request request{};
  std::uint64_t taken_ns = 0;

  std::vector<std::int64_t> ids;     // validated, as far as they are taken
  std::vector<std::uint32_t> first;  // first position with the same id; once duplicates are known
  std::vector<std::uint8_t> missed;  // by position: its row had to be read
  Destination destination;
  Copiers copiers;
  PartCopier part_copier = nullptr;  // where the layer is resident in split layout
  bool all_in_dram = false;          // decided when it began: all rows are resident
  // Where the client's ids lie, as long as blocks take theirs as they come; null once all are taken.
  const std::uint8_t* untaken_ids = nullptr;
  bool knows_duplicates = false;  // `first` and rows_distinct are there: from the first miss on
  bool has_duplicates = false;
  bool reports_progress = false;  // its client copies rows that are ready while the rest is looked up
  bool prefetch = false;
  bool warm = false;  // a prefetch of the daemon's own, answered when its rows are there

  std::unique_ptr<SharedLookUp> shared;
  std::uint32_t next_row = 0;  // look-ups done so far
  bool looked_up = false;
  MissPages pages;
  std::uint32_t next_page = 0;   // of pages: not handed to the reader yet from here on
  std::uint32_t pages_open = 0;  // waiting or in flight
  bool queued = false;           // in one of the worker's page queues

  std::uint64_t rows_zero = 0;
  std::uint64_t rows_distinct = 0;
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t rows_failed = 0;
  std::uint64_t page_reads = 0;
  engram_failure failure{};  // the first one; status EMPTY = none

  std::uint32_t row_count() const { return static_cast<std::uint32_t>(ids.size()); }
  bool finished() const { return looked_up && pages_open == 0; }

  void fail(std::uint32_t status, std::uint64_t position, std::int64_t row, std::uint64_t page,
            std::int32_t error_number) {
    if (failure.status == ENGRAM_STATUS_EMPTY) failure = {status, error_number, position, row, page};
  }

  // Ready for another request, keeping the vectors' memory.
  void reset() {
    layer = nullptr;
    placement.reset();
    session = nullptr;
    local.reset();
    owner = 0;
    request = {};
    destination = {};
    shared.reset();
    untaken_ids = nullptr;
    all_in_dram = knows_duplicates = has_duplicates = reports_progress = prefetch = warm = looked_up = queued = false;
    next_row = next_page = pages_open = 0;
    pages.clear();
    rows_zero = rows_distinct = hits = misses = rows_failed = page_reads = 0;
    failure = {};
  }
};

}  // namespace engram

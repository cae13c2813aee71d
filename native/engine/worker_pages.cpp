// Rows on the drive: pages are read once per batch, every row is checked before it leaves, and offered to the cache.
#include <algorithm>

#include "engine/worker.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint32_t kPagesPerTurn = 16;           // of one batch before the next one's turn
constexpr std::uint32_t kReadsPerTurn = 16;           // handed over before new requests are looked for: tens of us
constexpr std::uint32_t kReapedPerTurn = 32;          // the same for completions
constexpr std::uint32_t kSmallTurns = 7;              // before a large batch that waits has its turn
constexpr std::int64_t kDemandMemoryNs = 10'000'000;  // prefetch makes itself small this long after a fetch

}  // namespace

Worker::PageQueue& Worker::page_queue(const Batch& batch) {
  if (batch.prefetch) return prefetch_pages_;
  return batch.row_count() <= kSmallRows ? small_pages_ : large_pages_;
}

void Worker::queue_pages(Batch& batch) {
  if (batch.queued) return;
  batch.queued = true;
  page_queue(batch).batches.push(batch.owner, &batch);
}

// The queue whose first batch may send a page now: small batches before large ones before prefetches. A flood of small
// batches must not keep large ones out for ever, so each eighth turn is a large one's, and is waited for.
Worker::PageQueue* Worker::next_queue_to_read() {
  if (free_buffers_.empty()) return nullptr;
  const bool large_turn = small_turns_ >= kSmallTurns && !large_pages_.batches.empty();
  PageQueue* next = nullptr;
  if (!small_pages_.batches.empty() && !large_turn) {
    next = &small_pages_;
  } else if (!large_pages_.batches.empty()) {
    next = &large_pages_;
  } else if (!prefetch_pages_.batches.empty()) {
    next = &prefetch_pages_;
  }
  if (next == nullptr || in_flight_.load(std::memory_order_relaxed) >= next->in_flight_limit) return nullptr;
  small_turns_ = next == &small_pages_ && !large_pages_.batches.empty() ? small_turns_ + 1 : 0;
  return next;
}

bool Worker::submit_reads() {
  bool submitted = false;
  if (!prefetch_pages_.batches.empty()) {
    // What is asked for next must not find the drive's queue full of what may never be asked for.
    const std::uint32_t cap = options_.in_flight_cap;
    const bool demand_lately = monotonic_ns() - last_demand_ns_ < kDemandMemoryNs;
    prefetch_pages_.in_flight_limit = std::max(1u, demand_lately ? cap / 4 : cap - cap / 8);
  }
  std::uint32_t turn_left = kReadsPerTurn;
  PageQueue* queue = nullptr;
  while (turn_left > 0 && (queue = next_queue_to_read()) != nullptr) {
    Batch* batch = queue->batches.front();
    queue->batches.pop();
    std::uint32_t in_flight = in_flight_.load(std::memory_order_relaxed);
    for (std::uint32_t turn = 0; turn < kPagesPerTurn && batch->next_page < batch->pages.size(); ++turn) {
      if (turn_left == 0 || free_buffers_.empty() || in_flight >= queue->in_flight_limit) break;
      --turn_left;
      MissPage& page = batch->pages.at(batch->next_page);
      const std::uint32_t buffer = free_buffers_.back();
      free_buffers_.pop_back();
      const Layer::Place place = batch->layer->place(page.page);
      InFlight& flight = flights_[buffer];
      flight.batch = batch;
      flight.page = batch->next_page++;
      flight.read = {};
      flight.read.file = place.file;
      flight.read.offset = place.offset;
      flight.read.bytes = batch->layer->layout.page_bytes;
      flight.read.buffer = buffer;
      page.buffer = buffer;
      page.state = MissPage::State::in_flight;
      ++batch->page_reads;
      in_flight_.store(++in_flight, std::memory_order_relaxed);
      reader_->submit(&flight.read);
    }
    if (batch->next_page < batch->pages.size()) {
      queue->batches.push(batch->owner, batch);
    } else {
      batch->queued = false;
    }
    submitted = true;
  }
  reads_due_ = turn_left == 0;
  if (submitted) reader_->flush();
  return submitted;
}

bool Worker::reap_reads() {
  std::uint32_t count = 0;
  if (in_flight_.load(std::memory_order_relaxed) != 0 || reader_->is_io_uring()) {
    PageRead* reads[kReapedPerTurn];
    count = reader_->reap(reads, kReapedPerTurn);
    for (std::uint32_t i = 0; i < count; ++i) finish_read(flights_[reads[i]->buffer]);
  }
  if (retire_later_) {
    retire_later_ = false;
    retire_closed_sessions();
  }
  return count > 0;
}

void Worker::finish_read(InFlight& flight) {
  in_flight_.store(in_flight_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
  Batch& batch = *flight.batch;
  MissPage& page = batch.pages.at(flight.page);
  const std::uint32_t buffer = flight.read.buffer;
  if (flight.read.result == 0) {
    const std::uint8_t* bytes = buffers_->at(buffer);
    wrong_positions_.clear();
    batch.pages.visit_rows(page, [&](std::uint32_t position) {
      if (!serve_position(batch, page, bytes, position)) wrong_positions_.push_back(position);
    });
    if (!wrong_positions_.empty() && !page.read_again) {
      batch.pages.keep_rows(flight.page, wrong_positions_);
      read_again(flight);
      return;
    }
    for (const std::uint32_t position : wrong_positions_) {
      fail_position(batch, page.page, position, ENGRAM_STATUS_PAGE_CORRUPT, 0);
    }
    page.state = batch.looked_up ? MissPage::State::done : MissPage::State::arrived;
  } else {
    page.error_number = -flight.read.result;
    page.state = MissPage::State::failed;
    batch.pages.visit_rows(page, [&](std::uint32_t position) {
      fail_position(batch, page.page, position, ENGRAM_STATUS_READ_FAILED, page.error_number);
    });
  }
  if (page.state != MissPage::State::arrived) free_buffers_.push_back(buffer);
  --batch.pages_open;
  if (batch.finished()) {
    if (!batch.prefetch && batch.row_count() <= kSmallRows) --small_open_;
    complete(&batch);
  }
}

// A row's checksum failed. What was wrong on the way (a bus, the drive's own memory) is right the second time; what
// lies wrong on the drive is not, and fails the request then. Its buffer, and its place among the reads in flight,
// stay.
void Worker::read_again(InFlight& flight) {
  Batch& batch = *flight.batch;
  MissPage& page = batch.pages.at(flight.page);
  page.read_again = true;
  page.state = MissPage::State::in_flight;
  flight.read.done = 0;
  flight.read.attempts = 0;
  ++batch.page_reads;
  batch.layer->counters[options_.index].rereads.add(1);
  in_flight_.store(in_flight_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  reader_->submit(&flight.read);
  reader_->flush();
}

// Checks the row, copies it to its place, offers it to the cache. False where the check fails.
bool Worker::serve_position(Batch& batch, const MissPage& page, const std::uint8_t* buffer, std::uint32_t position) {
  const Layer& layer = *batch.layer;
  const auto row = static_cast<std::uint64_t>(batch.ids[position]);
  const auto index = static_cast<std::uint32_t>(row - page.page * layer.layout.rows_per_page);
  if (!layer.row_ok(buffer, row, index)) return false;
  const std::uint8_t* bytes = buffer + layer.layout.row_offset(index);
  if (!batch.prefetch) batch.destination.put(position, bytes);
  const bool duplicate = batch.has_duplicates && batch.first[position] != position;
  RowCache* cache = batch.placement->cache.get();
  if (cache != nullptr && !duplicate) {
    cache->admit(row_key(layer.handle, row), bytes, batch.warm);
  }
  return true;
}

void Worker::fail_position(Batch& batch, std::uint64_t page, std::uint32_t position, std::uint32_t status,
                           std::int32_t error_number) {
  if (batch.prefetch) return;  // whoever asks for the row will hear of it
  std::uint64_t& counted = batch.missed[position] != 0 ? batch.misses : batch.hits;
  --counted;
  ++batch.rows_failed;
  if (batch.failure.status != ENGRAM_STATUS_EMPTY && batch.failure.page == page) return;
  batch.fail(status, position, batch.ids[position], page, error_number);
  engram_event event{};
  event.kind = ENGRAM_EVENT_PAGE;
  event.status = status;
  event.session = batch.owner;
  event.request_id = batch.request.request_id;
  event.handle = batch.layer->handle;
  event.page = page;
  event.row_id = batch.ids[position];
  event.error_number = error_number;
  shared_.events.push(event);
}

}  // namespace engram

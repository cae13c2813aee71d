// From slots to batches and back: taking, checking and copying what a client submitted, and completing it.
#include <algorithm>
#include <cstring>

#include "engine/worker.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint32_t kTakePerTurn = 8;  // requests of one session in a row
constexpr std::size_t kSpareBatches = 64;
constexpr std::size_t kSpareRows = 1u << 16;  // a spare batch keeps memory for at most this many rows
constexpr std::uint32_t kReplyAlignment = 64;
constexpr std::uint32_t kIdsAlignment = 8;

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(monotonic_ns());
}

engram_failure outcome_of(std::uint32_t status) {
  engram_failure outcome{};
  outcome.status = status;
  return outcome;
}

}  // namespace

std::unique_ptr<Batch> Worker::spare_batch() {
  if (spare_batches_.empty()) return std::make_unique<Batch>();
  std::unique_ptr<Batch> batch = std::move(spare_batches_.back());
  spare_batches_.pop_back();
  return batch;
}

bool Worker::take_requests() {
  bool worked = false;
  const std::size_t count = sessions_.size();
  for (std::size_t turn = 0; turn < count; ++turn) {
    if (next_session_ >= count) next_session_ = 0;
    worked |= take_from(*sessions_[next_session_++]);
  }
  return worked;
}

bool Worker::take_from(RingSession& session) {
  if (session.closing) return false;
  session.held_back = false;
  // Stream slots come into play once the session has been armed for the first time.
  const bool took_streams = session.armed_until_ns != 0 && take_streams(session);
  const std::uint32_t submitted = session.submitted(session.tail());
  if (submitted == 0) return took_streams;
  bool violated = submitted > session.geometry().slot_count;
  std::uint32_t taken = 0;
  for (; taken < std::min(submitted, kTakePerTurn) && !violated; ++taken) {
    std::uint32_t slot = 0;
    engram_request request;
    const RingSession::Take result = session.take(&slot, &request);
    if (result == RingSession::Take::later) {
      session.held_back = true;
      return taken > 0 || took_streams;
    }
    if (result == RingSession::Take::violation) {
      violated = true;
      break;
    }
    open_requests_.fetch_add(1, std::memory_order_seq_cst);
    begin_ring_request(session, slot, request);
  }
  if (violated) {
    return end_session_of_violator(session,
                                   "its submit ring names more slots than there are, or one that is still in use");
  }
  return true;
}

// Served no more; the event loop logs it and closes the socket, which closes the session.
bool Worker::end_session_of_violator(RingSession& session, const char* what) {
  session.closing = true;
  reader_->unwatch(session.doorbell());
  engram_event event{};
  event.kind = ENGRAM_EVENT_VIOLATION;
  event.session = session.id;
  std::strncpy(event.text, what, sizeof event.text - 1);
  shared_.events.push(event);
  return true;
}

// True where the request makes sense; its ids are still to be checked.
bool Worker::check_request(const engram_request& request, std::uint64_t ids_bytes, std::uint64_t reply_bytes,
                           std::uint64_t max_reply_bytes, engram_failure& failure) const {
  if (shared_.stopping.load(std::memory_order_seq_cst)) {
    failure = outcome_of(ENGRAM_STATUS_STOPPING);
    return false;
  }
  const Layer* layer = shared_.layer(request.handle);
  if (layer == nullptr) {
    failure = outcome_of(ENGRAM_STATUS_UNKNOWN_TABLE);
    return false;
  }
  if (layer->retired()) {
    failure = outcome_of(ENGRAM_STATUS_STALE);
    return false;
  }
  const auto within = [](std::uint64_t offset, std::uint64_t bytes, std::uint64_t area) {
    return bytes <= area && offset <= area - bytes;
  };
  const bool prefetch = request.operation == ENGRAM_OPERATION_PREFETCH;
  const std::uint64_t ids = std::uint64_t{request.row_count} * request.id_bytes;
  const std::uint64_t reply = std::uint64_t{request.row_count} * layer->row_bytes;
  const bool good = (prefetch || request.operation == ENGRAM_OPERATION_FETCH) &&
                    (request.id_bytes == 4 || request.id_bytes == 8) &&
                    (request.layout == ENGRAM_LAYOUT_PACKED ||
                     (request.layout == ENGRAM_LAYOUT_SPLIT && layer->value_bytes < layer->row_bytes)) &&
                    within(request.ids_offset, ids, ids_bytes) && request.ids_offset % kIdsAlignment == 0 &&
                    (prefetch || (within(request.reply_offset, reply, reply_bytes) && reply <= max_reply_bytes &&
                                  request.reply_offset % kReplyAlignment == 0)) &&
                    request.part_index < request.part_count && (request.flags & ~ENGRAM_REQUEST_PROGRESS) == 0 &&
                    request.reserved == 0;
  if (!good) failure = outcome_of(ENGRAM_STATUS_BAD_REQUEST);
  return good;
}

// Answers a request that did not get as far as its ids.
void Worker::refuse(std::unique_ptr<Batch> batch) {
  batch->looked_up = true;
  batch->ids.clear();
  batch->layer = shared_.layer(batch->request.handle);
  if (batch->layer != nullptr) count_request(*batch);
  batches_.push_back(std::move(batch));
  complete(batches_.back().get());
}

void Worker::begin_ring_request(RingSession& session, std::uint32_t slot, const engram_request& request) {
  if (request.operation == ENGRAM_OPERATION_ARM_STREAMS && slot < session.geometry().slot_count) {
    arm_streams(session, slot, request);
    return;
  }
  std::unique_ptr<Batch> batch = spare_batch();
  batch->session = &session;
  batch->owner = session.id;
  batch->slot = slot;
  batch->request = request;
  batch->taken_ns = now_ns();
  const engram_ring_geometry& geometry = session.geometry();
  if (!check_request(request, geometry.ids_bytes, geometry.arena_bytes, geometry.max_reply_bytes, batch->failure)) {
    refuse(std::move(batch));
    return;
  }
  if (request.operation == ENGRAM_OPERATION_FETCH) {
    batch->destination.values = session.arena(request.reply_offset);
    batch->reports_progress = (request.flags & ENGRAM_REQUEST_PROGRESS) != 0 && slot < geometry.slot_count;
  }
  begin_batch(std::move(batch), session.ids(request.ids_offset));
}

// False where the layer was retired since it was checked.
bool Worker::enter_layer(Batch& batch) {
  Layer* used = shared_.layer(batch.request.handle);
  if (!used->begin_use()) return false;
  batch.layer = used;
  batch.placement = used->placement();
  batch.all_in_dram = batch.request.operation != ENGRAM_OPERATION_PREFETCH && batch.placement->resident != nullptr &&
                      batch.placement->resident->complete();
  return true;
}

void Worker::begin_batch(std::unique_ptr<Batch> batch, const std::uint8_t* ids) {
  if (enter_layer(*batch)) {
    run_batch(std::move(batch), ids);
  } else {
    batch->failure = outcome_of(ENGRAM_STATUS_STALE);
    refuse(std::move(batch));
  }
}

// From its ids on: the layer is in use. A small batch that is all in DRAM is complete afterwards.
void Worker::run_batch(std::unique_ptr<Batch> owned, const std::uint8_t* ids) {
  Batch& batch = *owned;
  batches_.push_back(std::move(owned));
  const Layer& layer = *batch.layer;
  const Placement& placement = *batch.placement;
  const engram_request& request = batch.request;
  const std::uint32_t count = request.row_count;
  batch.prefetch = request.operation == ENGRAM_OPERATION_PREFETCH;
  count_request(batch);

  batch.ids.resize(count);
  batch.untaken_ids = ids;
  // Where reads may start before the last block's turn, a bad id must have been found.
  if (!batch.all_in_dram && !take_all_ids(batch)) {
    complete(&batch);
    return;
  }

  if (batch.prefetch) {
    // The slot is the client's again at once; what follows is best effort, and useless without a row cache.
    if (!batch.warm) {
      answer(batch, outcome_of(ENGRAM_STATUS_OK));
      batch.session = nullptr;
      batch.local.reset();
    }
    const bool useful = placement.cache != nullptr;
    const bool taken = useful && prefetch_quota_.take(batch.owner, count, options_.prefetch_rows);
    if (useful && !taken) prefetch_dropped_rows_.add(count);
    if (!taken) {
      batch.ids.clear();
      batch.looked_up = true;
      complete(&batch);
      return;
    }
    batch.missed.assign(count, 0);
    looking_up_prefetch_.push_back(&batch);
    return;
  }

  if (request.layout == ENGRAM_LAYOUT_SPLIT) {
    batch.destination.value_bytes = layer.value_bytes;
    batch.destination.scale_bytes = layer.row_bytes - layer.value_bytes;
    batch.destination.scales = batch.destination.values + std::uint64_t{count} * layer.value_bytes;
  } else {
    batch.destination.value_bytes = layer.row_bytes;
  }
  batch.copiers = choose_copiers(batch.destination.value_bytes, batch.destination.scale_bytes);
  if (placement.resident != nullptr && placement.resident->is_split()) {
    batch.part_copier = choose_part_copier(layer.value_bytes, layer.row_bytes - layer.value_bytes);
  }
  last_demand_ns_ = static_cast<std::int64_t>(batch.taken_ns);
  if (!batch.all_in_dram) batch.missed.assign(count, 0);

  if (count <= kSmallRows) {
    last_small_ns_ = last_demand_ns_;
    while (!batch.looked_up) look_up_block(batch);
    if (batch.finished()) {
      complete(&batch);
    } else {
      ++small_open_;
    }
  } else {
    share(batch);
    looking_up_.push(batch.owner, &batch);
  }
}

// A request split by the client counts once, when its first part comes.
void Worker::count_request(Batch& batch) {
  const engram_request& request = batch.request;
  LayerCounters& counters = batch.layer->counters[options_.index];
  RingSession* session = batch.session;
  if (request.part_count > 1 && session != nullptr) {
    auto& splits = session->split_requests;
    const bool known = std::any_of(splits.begin(), splits.end(),
                                   [&](const SplitRequest& split) { return split.request_id == request.request_id; });
    if (known) return;
    if (splits.size() >= session->geometry().slot_count) splits.erase(splits.begin());
    splits.push_back({request.request_id, batch.taken_ns, 0, false});
  } else if (request.part_count > 1 && request.part_index > 0) {
    return;
  }
  if (!batch.warm) counters.requests.add(1);
  if (session != nullptr) session->counters->requests.add(1);
}

// Ends a batch: counts it, answers, and keeps its memory for another.
void Worker::complete(Batch* batch) {
  engram_failure outcome = batch->failure;
  if (outcome.status == ENGRAM_STATUS_EMPTY) outcome.status = ENGRAM_STATUS_OK;
  bool distinct_later = false;
  if (batch->prefetch) {
    if (batch->layer != nullptr) {
      if (batch->warm) {
        batch->layer->background_reads.fetch_add(batch->page_reads, std::memory_order_relaxed);
      } else {
        batch->layer->counters[options_.index].prefetch_reads.add(batch->page_reads);
      }
      if (!batch->ids.empty()) prefetch_quota_.give_back(batch->owner, batch->ids.size());
    }
  } else if (batch->layer != nullptr && outcome.status != ENGRAM_STATUS_ROW_ID) {
    LayerCounters& counters = batch->layer->counters[options_.index];
    counters.rows_zero.add(batch->rows_zero);
    counters.dram_hits.add(batch->hits);
    counters.dram_misses.add(batch->misses);
    counters.rows_failed.add(batch->rows_failed);
    if (batch->knows_duplicates) {
      counters.rows_unique.add(batch->rows_distinct);
    } else {
      distinct_later = true;
    }
    counters.nvme_reads.add(batch->page_reads);
    if (batch->session != nullptr) batch->session->counters->rows.add(batch->row_count());
  }
  if (batch->session != nullptr || batch->local != nullptr) answer(*batch, outcome);
  if (distinct_later) count_distinct_later(*batch);  // takes the ids, whose number the answer needs
  if (batch->placement != nullptr) batch->layer->end_use();

  const auto place =
      std::find_if(batches_.begin(), batches_.end(), [&](const auto& open) { return open.get() == batch; });
  std::unique_ptr<Batch> owned = std::move(*place);
  *place = std::move(batches_.back());
  batches_.pop_back();
  keep_spare(std::move(owned));
}

void Worker::keep_spare(std::unique_ptr<Batch> batch) {
  if (spare_batches_.size() >= kSpareBatches || batch->ids.capacity() > kSpareRows) return;
  batch->reset();
  spare_batches_.push_back(std::move(batch));
}

// The answer itself, with the request's latency and error counts. Counters come first: whoever sees the completion sees
// them.
void Worker::answer(Batch& batch, const engram_failure& outcome) {
  const engram_request& request = batch.request;
  RingSession* session = batch.session;
  bool count_error = outcome.status != ENGRAM_STATUS_OK;
  bool last = request.part_count <= 1 || session == nullptr;
  std::uint64_t rows = batch.row_count();
  std::uint64_t began_ns = batch.taken_ns;
  if (!last) {
    auto& splits = session->split_requests;
    const auto split = std::find_if(splits.begin(), splits.end(), [&](const SplitRequest& candidate) {
      return candidate.request_id == request.request_id;
    });
    if (split != splits.end()) {
      count_error = count_error && !split->failed;
      split->failed = split->failed || outcome.status != ENGRAM_STATUS_OK;
      last = ++split->parts_done == request.part_count;
      rows = request.total_rows;
      began_ns = split->taken_ns;
      if (last) splits.erase(split);
    }
  }
  if (batch.layer != nullptr && count_error) batch.layer->counters[options_.index].errors[outcome.status].add(1);
  if (last && !batch.prefetch && outcome.status == ENGRAM_STATUS_OK)
    latency_[latency_class(rows)].add(now_ns() - began_ns);

  if (session != nullptr) {
    session->complete(batch.slot, outcome, batch.hits, batch.misses);
    if (session->closing && session->in_flight() == 0) retire_later_ = true;
  } else if (batch.local != nullptr) {
    finish(std::move(batch.local), outcome);
  }
  open_requests_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace engram

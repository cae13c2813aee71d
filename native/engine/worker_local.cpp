// Requests made inside the daemon, on a worker's thread or, where that takes microseconds, on their caller's.
#include "engine/worker.h"
#include "ring/futex.h"

namespace engram {

// A batch for the request. False in `good` where the request makes no sense.
std::unique_ptr<Batch> Worker::local_batch(const std::shared_ptr<LocalRequest>& local, bool* good) {
  std::unique_ptr<Batch> batch = spare_batch();
  batch->local = local;
  batch->request = local->request;
  batch->taken_ns = static_cast<std::uint64_t>(monotonic_ns());
  batch->warm = local->warm;
  if (local->request.operation == ENGRAM_OPERATION_FETCH) batch->destination.values = local->reply.get();
  *good = check_request(local->request, local->ids.size(), local->reply_bytes, local->reply_bytes, batch->failure);
  return batch;
}

void Worker::begin_local_request(const std::shared_ptr<LocalRequest>& local) {
  open_requests_.fetch_add(1, std::memory_order_seq_cst);
  bool good = false;
  std::unique_ptr<Batch> batch = local_batch(local, &good);
  if (good) {
    begin_batch(std::move(batch), local->ids.data());
  } else {
    refuse(std::move(batch));
  }
}

bool Worker::serve_at_once(const std::shared_ptr<LocalRequest>& local) {
  if (local->request.row_count > kSmallRows) return false;
  bool good = false;
  std::unique_ptr<Batch> batch = local_batch(local, &good);
  if (!good || !enter_layer(*batch)) {  // a worker says why
    keep_spare(std::move(batch));
    return false;
  }
  if (!batch->all_in_dram) {
    batch->layer->end_use();
    keep_spare(std::move(batch));
    return false;
  }
  open_requests_.fetch_add(1, std::memory_order_seq_cst);
  run_batch(std::move(batch), local->ids.data());
  while (count_distinct_step()) {
  }
  return true;
}

}  // namespace engram

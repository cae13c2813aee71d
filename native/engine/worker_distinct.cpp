// Counting distinct rows of batches that were wholly in DRAM: bookkeeping that nobody waits for, done in idle moments,
// and before counters are read. Bounded: a worker that is never idle counts as it goes.
#include <algorithm>
#include <utility>

#include "engine/worker.h"

namespace engram {
namespace {

constexpr std::uint64_t kMaxPendingRows = 1u << 22;
constexpr std::uint32_t kStepRows = 256;  // a microsecond

}  // namespace

void Worker::count_distinct_later(Batch& batch) {
  if (batch.ids.empty()) return;
  PendingCount pending;
  pending.counters = &batch.layer->counters[options_.index];
  pending.ids = std::move(batch.ids);
  batch.ids.clear();
  if (!spare_ids_.empty()) {
    batch.ids = std::move(spare_ids_.back());
    spare_ids_.pop_back();
  }
  pending_rows_ += pending.ids.size();
  pending_counts_.push_back(std::move(pending));
  while (pending_rows_ > kMaxPendingRows) count_distinct_step();
}

// A step of the oldest count. False where there is none.
bool Worker::count_distinct_step() {
  if (pending_counts_.empty()) return false;
  PendingCount& pending = pending_counts_.front();
  const auto count = static_cast<std::uint32_t>(pending.ids.size());
  if (pending.next == 0) pending_distinct_.begin(count);
  const std::uint32_t end = std::min(count, pending.next + kStepRows);
  pending.counters->rows_unique.add(pending_distinct_.step(pending.ids.data(), pending.next, end, nullptr));
  pending.next = end;
  if (end == count) {
    pending_rows_ -= count;
    if (spare_ids_.size() < kSpareIds) spare_ids_.push_back(std::move(pending.ids));
    pending_counts_.pop_front();
  }
  return true;
}

void Worker::settle_counters() {
  Mail mail;
  mail.settled = std::make_shared<std::promise<void>>();
  std::future<void> settled = mail.settled->get_future();
  post(std::move(mail));
  settled.wait_for(std::chrono::seconds(1));  // a worker that is stopping answers nobody
}

}  // namespace engram

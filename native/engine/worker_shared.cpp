// Large batches are looked up by several workers: blocks are handed out by a counter, hits are copied by whoever took
// the block, and the batch's own worker then accounts for all of it and reads what was missing.
//
// Lifetime: a helper registers under the lock while the batch is published, and the batch's own worker ends it only
// after it has withdrawn it and every helper has left.
#include <algorithm>

#include "engine/worker.h"

namespace engram {
namespace {

constexpr std::uint32_t kMinSharedRows = 8 * RowCache::kBlockRows;  // below that a wake-up costs more than it brings

}  // namespace

void Worker::share(Batch& batch) {
  if (shared_.workers.size() < 2 || batch.prefetch || batch.row_count() < kMinSharedRows) return;
  batch.shared = std::make_unique<SharedLookUp>();
  batch.shared->block_count = (batch.row_count() + RowCache::kBlockRows - 1) / RowCache::kBlockRows;
  {
    const std::lock_guard lock(shared_.sharing_mutex);
    shared_.sharing.push_back(&batch);
    shared_.shared_batches.store(static_cast<std::uint32_t>(shared_.sharing.size()), std::memory_order_seq_cst);
  }
  for (Worker* worker : shared_.workers) {
    if (worker != this) worker->wake_if_asleep();
  }
}

void Worker::withdraw(Batch& batch) {
  const std::lock_guard lock(shared_.sharing_mutex);
  std::erase(shared_.sharing, &batch);
  shared_.shared_batches.store(static_cast<std::uint32_t>(shared_.sharing.size()), std::memory_order_seq_cst);
}

// The batch's own worker: a block, or, once all are taken, the end.
void Worker::look_up_shared_block(Batch& batch) {
  SharedLookUp& shared = *batch.shared;
  if (copy_shared_block(batch)) return;
  if (!shared.withdrawn) {
    withdraw(batch);
    shared.withdrawn = true;
  }
  // Acquire: what the helpers wrote is there once they have left.
  if (shared.helpers.load(std::memory_order_acquire) != 0) return;
  batch.rows_zero += shared.rows_zero.load(std::memory_order_relaxed);
  const std::uint32_t bad = shared.first_bad.load(std::memory_order_relaxed);
  batch.shared.reset();
  if (bad != UINT32_MAX) {
    fail_bad_id(batch, bad);
    return;
  }
  if (!batch.all_in_dram) account(batch, 0, batch.row_count());
  batch.next_row = batch.row_count();
  end_look_up(batch);
  if (batch.next_page < batch.pages.size()) queue_pages(batch);
}

// Any worker: takes the next block of the batch and copies what is in DRAM. False where no block is left.
bool Worker::copy_shared_block(Batch& batch) {
  SharedLookUp& shared = *batch.shared;
  const std::uint32_t block = shared.next_block.fetch_add(1, std::memory_order_relaxed);
  if (block >= shared.block_count) return false;
  const std::uint32_t begin = block * RowCache::kBlockRows;
  const std::uint32_t count = std::min(RowCache::kBlockRows, batch.row_count() - begin);
  if (batch.untaken_ids != nullptr) {
    std::uint64_t zeros = 0;
    const std::uint32_t bad = take_ids(batch, begin, count, &zeros);
    shared.rows_zero.fetch_add(zeros, std::memory_order_relaxed);
    if (bad != UINT32_MAX) {
      std::uint32_t first = shared.first_bad.load(std::memory_order_relaxed);
      while (bad < first && !shared.first_bad.compare_exchange_weak(first, bad, std::memory_order_relaxed)) {
      }
      return true;  // the other blocks go on: one may hold an earlier bad id
    }
  }
  copy_block(batch, begin, count);
  return true;
}

// Another worker: one block of the oldest shared batch.
bool Worker::help_with_block() {
  Batch* batch = nullptr;
  {
    const std::lock_guard lock(shared_.sharing_mutex);
    if (shared_.sharing.empty()) return false;
    batch = shared_.sharing.front();
    batch->shared->helpers.fetch_add(1, std::memory_order_relaxed);
  }
  const bool copied = copy_shared_block(*batch);
  // Release: the owner sees what was copied. The batch must not be touched afterwards.
  batch->shared->helpers.fetch_sub(1, std::memory_order_release);
  return copied;
}

}  // namespace engram

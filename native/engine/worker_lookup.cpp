// Rows in DRAM: look-ups and copies, block by block.
#include <algorithm>

#include "engine/worker.h"

namespace engram {

// One block of the oldest large batch, or of a batch that another worker shares, or of the oldest prefetch.
bool Worker::look_up_next_large() {
  if (!looking_up_.empty()) {
    Batch* batch = looking_up_.front();
    if (batch->shared != nullptr) {
      look_up_shared_block(*batch);
    } else {
      look_up_block(*batch);
    }
    if (batch->looked_up) {
      looking_up_.pop();
      if (batch->finished()) complete(batch);
    }
    return true;
  }
  if (shared_.shared_batches.load(std::memory_order_relaxed) != 0 && help_with_block()) return true;
  if (looking_up_prefetch_.empty()) return false;
  Batch* batch = looking_up_prefetch_.front();
  look_up_block(*batch);
  if (batch->looked_up) {
    looking_up_prefetch_.pop_front();
    if (batch->finished()) complete(batch);
  }
  return true;
}

void Worker::look_up_block(Batch& batch) {
  const std::uint32_t begin = batch.next_row;
  const std::uint32_t count = std::min(RowCache::kBlockRows, batch.row_count() - begin);
  if (batch.untaken_ids != nullptr) {
    const std::uint32_t bad = take_ids(batch, begin, count, &batch.rows_zero);
    if (bad != UINT32_MAX) {
      fail_bad_id(batch, bad);
      return;
    }
  }
  copy_block(batch, begin, count);
  if (!batch.all_in_dram) account(batch, begin, count);
  batch.next_row += count;
  if (batch.next_row == batch.row_count()) {
    end_look_up(batch);
  } else if (batch.reports_progress && batch.misses == 0) {
    batch.session->report_rows_ready(batch.slot, batch.next_row);
  }
  if (batch.next_page < batch.pages.size()) queue_pages(batch);
}

// Copies the block's rows that are in DRAM, and notes in `missed` which are not. Any worker: several may be at
// different blocks of one batch.
void Worker::copy_block(Batch& batch, std::uint32_t begin, std::uint32_t count) {
  RowCache* cache = batch.placement->cache.get();
  if (cache != nullptr) {
    cache->enter(options_.index);
    copy_cached(batch, *cache, begin, count);
    cache->leave(options_.index);
  } else {
    copy_resident(batch, begin, count);
  }
}

void Worker::copy_resident(Batch& batch, std::uint32_t begin, std::uint32_t count) {
  const ResidentRows* resident = batch.placement->resident.get();
  if (resident != nullptr && resident->is_split()) {
    copy_resident_parts(batch, *resident, begin, count);
    return;
  }
  const std::int64_t* ids = batch.ids.data() + begin;
  const std::uint8_t* sources[RowCache::kBlockRows];
  if (batch.all_in_dram) {
    for (std::uint32_t i = 0; i < count; ++i) {
      sources[i] = ids[i] < 0 ? zero_row_.data() : resident->row(static_cast<std::uint64_t>(ids[i]));
    }
  } else {
    for (std::uint32_t i = 0; i < count; ++i) {
      const auto row = static_cast<std::uint64_t>(ids[i]);
      const bool there = ids[i] >= 0 && resident != nullptr && resident->has_page(batch.layer->page_of(row));
      sources[i] = ids[i] < 0 ? zero_row_.data() : there ? resident->row(row) : nullptr;
      batch.missed[begin + i] = sources[i] == nullptr ? 1 : 0;
    }
  }
  if (!batch.prefetch) batch.copiers.rows(sources, count, batch.destination, begin);
}

void Worker::copy_resident_parts(Batch& batch, const ResidentRows& resident, std::uint32_t begin, std::uint32_t count) {
  const std::int64_t* ids = batch.ids.data() + begin;
  std::int64_t there[RowCache::kBlockRows];
  if (!batch.all_in_dram) {
    for (std::uint32_t i = 0; i < count; ++i) {
      const bool missed = ids[i] >= 0 && !resident.has_page(batch.layer->page_of(static_cast<std::uint64_t>(ids[i])));
      there[i] = missed ? kNoRow : ids[i];
      batch.missed[begin + i] = missed ? 1 : 0;
    }
    ids = there;
  }
  if (batch.prefetch) return;
  const Layer& layer = *batch.layer;
  const PartSources sources{resident.values(), resident.scales(), layer.value_bytes,
                            layer.row_bytes - layer.value_bytes};
  batch.part_copier(sources, ids, count, batch.destination, begin);
}

// Inside the cache's epoch.
void Worker::copy_cached(Batch& batch, RowCache& cache, std::uint32_t begin, std::uint32_t count) {
  const std::int64_t* ids = batch.ids.data() + begin;
  std::uint8_t* missed = batch.missed.data() + begin;
  std::uint64_t keys[RowCache::kBlockRows] = {};
  std::uint32_t candidates[RowCache::kBlockRows];
  // Row id -1 makes a key that no row has.
  for (std::uint32_t i = 0; i < count; ++i) {
    keys[i] = row_key(batch.layer->handle, static_cast<std::uint64_t>(ids[i]));
  }
  cache.find_block(keys, count, candidates);
  if (batch.prefetch) {
    for (std::uint32_t i = 0; i < count; ++i) {
      missed[i] = ids[i] >= 0 && (candidates[i] == 0 || cache.row(candidates[i], keys[i]) == nullptr) ? 1 : 0;
    }
    return;
  }
  batch.copiers.slots({cache.slots(), cache.stride(), candidates, keys, missed}, count, batch.destination, begin);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (missed[i] == 0) continue;
    if (ids[i] < 0) {
      batch.destination.put_zeros(begin + i);
      missed[i] = 0;
    } else if (candidates[i] != 0) {
      // Another key with the same tag: rare. The key's own slot may be another candidate.
      const std::uint8_t* row = cache.row(candidates[i], keys[i]);
      if (row == nullptr) continue;
      batch.destination.put(begin + i, row);
      missed[i] = 0;
    }
  }
}

// Counts hits and misses of a range, and makes positions whose rows were not copied wait for their pages. Only the
// batch's own worker.
void Worker::account(Batch& batch, std::uint32_t begin, std::uint32_t count) {
  for (std::uint32_t position = begin; position < begin + count; ++position) {
    if (batch.ids[position] < 0) continue;
    const bool copied = batch.missed[position] == 0;
    if (!copied && !batch.prefetch && !batch.knows_duplicates) find_duplicates(batch);
    if (!batch.prefetch) {
      // A duplicate counts as its first occurrence did, whatever has happened to the cache since.
      bool missed = !copied;
      if (batch.has_duplicates && batch.first[position] != position) missed = batch.missed[batch.first[position]] != 0;
      batch.missed[position] = missed ? 1 : 0;
      batch.misses += missed ? 1 : 0;
      batch.hits += missed ? 0 : 1;
    }
    if (!copied) miss(batch, position);
  }
}

// Once a row is missing: so that a duplicate counts as its first occurrence did and is admitted once. What was
// accounted for before were hits, and so are their duplicates.
void Worker::find_duplicates(Batch& batch) {
  batch.knows_duplicates = true;
  batch.first.resize(batch.row_count());
  distinct_.begin(batch.row_count());
  batch.rows_distinct = distinct_.step(batch.ids.data(), 0, batch.row_count(), batch.first.data());
  batch.has_duplicates = batch.rows_distinct + batch.rows_zero < batch.row_count();
}

// The position waits for its page; or takes the row at once where the page has arrived during the look-up.
void Worker::miss(Batch& batch, std::uint32_t position) {
  const std::uint64_t page_number = batch.layer->page_of(static_cast<std::uint64_t>(batch.ids[position]));
  const std::uint32_t index = batch.pages.find_or_add(page_number);
  MissPage& page = batch.pages.at(index);
  switch (page.state) {
    case MissPage::State::arrived:
      if (serve_position(batch, page, buffers_->at(page.buffer), position)) break;
      if (page.read_again) {
        fail_position(batch, page.page, position, ENGRAM_STATUS_PAGE_CORRUPT, 0);
        break;
      }
      ++batch.pages_open;
      batch.pages.keep_rows(index, {position});
      read_again(flights_[page.buffer]);
      break;
    case MissPage::State::failed:
      fail_position(batch, page.page, position, ENGRAM_STATUS_READ_FAILED, page.error_number);
      break;
    default:
      if (page.first_row == 0) ++batch.pages_open;
      batch.pages.add_row(index, position);
  }
}

// All ids are known, and no position will be added any more: pages that had arrived early give their buffers back.
void Worker::end_look_up(Batch& batch) {
  batch.looked_up = true;
  batch.untaken_ids = nullptr;
  if (!batch.prefetch && shared_.sampler->wanted()) {
    shared_.sampler->observe(options_.index, *batch.layer, batch.ids.data(), batch.row_count(), batch.rows_zero);
  }
  if (batch.all_in_dram) batch.hits = batch.row_count() - batch.rows_zero;
  for (std::uint32_t i = 0; i < batch.next_page; ++i) {
    MissPage& page = batch.pages.at(i);
    if (page.state != MissPage::State::arrived) continue;
    page.state = MissPage::State::done;
    free_buffers_.push_back(page.buffer);
  }
}

}  // namespace engram

#include "cache/row_cache.h"

#include <algorithm>

namespace engram {
namespace {

constexpr std::uint32_t kSmallShare = 20;        // one slot in twenty is in the small region
constexpr std::uint64_t kMaxSweep = 4096;        // slots that the hand passes in one call, a quarter of a millisecond
constexpr std::uint32_t kMaxReserve = 64;        // free slots kept ready per region
constexpr std::uint64_t kRowsPerBucket = 6;      // of eight entries: 0.75 load
constexpr std::uint32_t kPrefetchDistance = 24;  // index lines ahead

std::uint32_t stride_of(const RowCache::Options& options) {
  const std::uint32_t row_bytes = options.simulated_rows != 0 ? 0 : options.row_bytes;
  return (8 + row_bytes + 7) & ~7u;
}

}  // namespace

std::uint64_t RowCache::index_buckets(std::uint64_t capacity) {
  return (capacity + kRowsPerBucket - 1) / kRowsPerBucket;
}

std::uint64_t RowCache::plan_capacity(const Options& options) {
  if (options.simulated_rows != 0) return std::min<std::uint64_t>(options.simulated_rows, kNoSlot - 1);
  const std::uint64_t stride = stride_of(options);
  const auto needed = [&](std::uint64_t rows) {
    const std::uint64_t ghost_sets = (rows + GhostTable::kSetEntries - 1) / GhostTable::kSetEntries;
    const std::uint64_t lists =
        std::min<std::uint64_t>(2 * kMaxReserve, rows / 4 + 2) * (sizeof(std::uint32_t) + sizeof(Retired));
    return rows * stride + index_buckets(rows) * sizeof(RowIndex::Bucket) + ghost_sets * GhostTable::kSetBytes + lists;
  };
  std::uint64_t rows = options.budget_bytes / (stride + 14);
  while (rows > 0 && needed(rows) > options.budget_bytes) rows -= std::max<std::uint64_t>(1, rows / 4096);
  if (rows < 2) return 0;  // a region needs a slot each
  return std::min<std::uint64_t>(rows, kNoSlot - 1);
}

RowCache::RowCache(const Options& options)
    : row_bytes_(options.simulated_rows != 0 ? 0 : options.row_bytes),
      stride_(stride_of(options)),
      capacity_(plan_capacity(options)),
      slots_(capacity_ * stride_),
      index_(index_buckets(capacity_)),
      ghosts_(capacity_),
      epochs_(options.readers) {
  const auto capacity = static_cast<std::uint32_t>(capacity_);
  const std::uint32_t small = capacity < 2 ? capacity : std::max(1u, capacity / kSmallShare);
  const auto lay_out = [](Region& region, std::uint32_t begin, std::uint32_t end) {
    region.begin = region.next_unused = region.hand = begin;
    region.end = end;
    region.reserve = std::min(kMaxReserve, (end - begin) / 8 + 1);
  };
  lay_out(small_, 0, small);
  lay_out(main_, small, capacity);
}

void RowCache::find_block(const std::uint64_t* keys, std::uint32_t count, std::uint32_t* slots) const {
  if (capacity_ == 0) {
    std::fill_n(slots, count, RowIndex::kNone);
    return;
  }
  std::uint64_t hashes[kBlockRows];
  for (std::uint32_t i = 0; i < count; ++i) hashes[i] = RowIndex::hash(keys[i]);
  for (std::uint32_t i = 0; i < std::min(count, kPrefetchDistance); ++i) __builtin_prefetch(index_.first(hashes[i]));
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i + kPrefetchDistance < count) __builtin_prefetch(index_.first(hashes[i + kPrefetchDistance]));
    slots[i] = RowIndex::kNone;
    index_.visit_candidates(hashes[i], [&](RowIndex::Entry entry, std::uint32_t slot) {
      RowIndex::count_hit(entry.bucket, entry.position);
      slots[i] = slot + 1;
      return true;
    });
  }
}

const std::uint8_t* RowCache::find_exact(std::uint64_t key) const {
  const std::uint8_t* found = nullptr;
  index_.visit_candidates(RowIndex::hash(key), [&](RowIndex::Entry, std::uint32_t slot) {
    const std::uint8_t* candidate = slot_at(slot);
    if (key_of(candidate) != key) return false;
    found = candidate + sizeof(std::uint64_t);
    return true;
  });
  return found;
}

RowIndex::Entry RowCache::entry_of_slot(std::uint32_t slot, std::uint64_t hash) const {
  RowIndex::Entry found;
  index_.visit_candidates(hash, [&](RowIndex::Entry entry, std::uint32_t candidate) {
    if (candidate != slot) return false;
    found = entry;
    return true;
  });
  return found;
}

void RowCache::retire(std::uint32_t slot) {
  region_of(slot).limbo.push_back({slot, epochs_.retire()});
}

void RowCache::reclaim(Region& region) {
  if (region.limbo.empty()) return;
  const std::uint64_t safe = epochs_.safe_below();
  while (!region.limbo.empty() && region.limbo.front().stamp < safe) {
    region.free.push_back(region.limbo.front().slot);
    region.limbo.pop_front();
  }
}

// Frees one slot of the region. False where the hand found nothing to free in some rounds and a bit, or in kMaxSweep
// slots: where all rows have hits (after a saved list) one call would hold up everybody for a round of millions.
bool RowCache::evict_one(Region& region) {
  const bool is_small = &region == &small_;
  std::uint64_t steps = (std::uint64_t{region.next_unused} - region.begin) * (RowIndex::kMaxHits + 1) + 1;
  steps = std::min(steps, kMaxSweep);
  while (steps-- > 0) {
    const std::uint32_t slot = region.hand;
    if (++region.hand >= region.next_unused) region.hand = region.begin;
    const std::uint64_t key = key_of(slot_at(slot));
    const std::uint64_t hash = RowIndex::hash(key);
    const RowIndex::Entry entry = entry_of_slot(slot, hash);
    if (entry.bucket == nullptr) continue;  // free already
    const std::uint8_t hits = entry.bucket->hits[entry.position].load(std::memory_order_relaxed);
    if (is_small && hits >= kPromotionHits) {
      const std::uint32_t target = allocate(main_);
      if (target != kNoSlot) {
        // Allocation may have pushed other entries about, but never this one: it evicts from the main region only.
        std::memcpy(slot_at(target), slot_at(slot), sizeof(std::uint64_t) + row_bytes_);
        index_.move(entry, target);
        retire(slot);
        return true;
      }
    } else if (!is_small && hits > 0) {
      entry.bucket->hits[entry.position].store(hits - 1, std::memory_order_relaxed);
      continue;
    }
    index_.remove(entry, hash);
    if (is_small) ghosts_.insert(hash);
    retire(slot);
    --rows_;
    return true;
  }
  return false;
}

std::uint32_t RowCache::allocate(Region& region) {
  if (region.next_unused < region.end) return region.next_unused++;
  while (region.free.size() + region.limbo.size() < region.reserve && evict_one(region)) {
  }
  reclaim(region);
  if (region.free.empty()) return kNoSlot;
  const std::uint32_t slot = region.free.back();
  region.free.pop_back();
  return slot;
}

// A free entry for the hash. Where both its buckets are full the entry with the fewest hits gives way.
RowIndex::Entry RowCache::make_entry(std::uint64_t hash) {
  RowIndex::Entry entry = index_.free_entry(hash);
  if (entry.bucket != nullptr) return entry;
  entry = {index_.first(hash), 0};
  for (std::uint32_t i = 1; i < RowIndex::kEntries; ++i) {
    if (entry.bucket->hits[i].load(std::memory_order_relaxed) <
        entry.bucket->hits[entry.position].load(std::memory_order_relaxed)) {
      entry.position = i;
    }
  }
  const std::uint32_t slot = entry.bucket->slots[entry.position].load(std::memory_order_relaxed) - 1;
  index_.remove(entry, RowIndex::hash(key_of(slot_at(slot))));
  retire(slot);
  --rows_;
  return entry;
}

void RowCache::admit(std::uint64_t key, const std::uint8_t* row, bool known_hot) {
  if (capacity_ == 0) return;
  const std::uint64_t hash = RowIndex::hash(key);
  const std::lock_guard lock(mutex_);
  if (find_exact(key) != nullptr) return;
  // Nothing is evicted while there are slots that have never held a row.
  const bool small_is_full = small_.next_unused == small_.end;
  const bool main_is_full = main_.next_unused == main_.end;
  // A saved list comes hottest first and pushes nothing out: every row of it has a hit, so that the hand would pass
  // over the whole region, and then take the hottest.
  if (known_hot && ((main_is_full && small_is_full) || index_.free_entry(hash).bucket == nullptr)) return;
  const bool to_main = ghosts_.take(hash) || (known_hot && !main_is_full) || (small_is_full && !main_is_full);
  const std::uint32_t slot = allocate(to_main ? main_ : small_);
  if (slot == kNoSlot) return;
  std::uint8_t* target = slot_at(slot);
  std::memcpy(target, &key, sizeof key);
  if (row_bytes_ != 0) std::memcpy(target + sizeof key, row, row_bytes_);
  const RowIndex::Entry entry = make_entry(hash);
  index_.publish(entry, hash, slot);
  if (known_hot) RowIndex::count_hit(entry.bucket, entry.position);
  ++rows_;
}

std::uint64_t RowCache::hot_rows(std::uint32_t layer_key, std::uint64_t* cursor, std::uint64_t* rows,
                                 std::uint64_t capacity) {
  // Two sweeps over the slots: rows that were read again first, then the others. The cursor counts slots over both.
  constexpr std::uint64_t kSlotsPerLock = 1024;
  std::uint64_t count = 0;
  while (count < capacity && *cursor < 2 * capacity_) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t end = std::min(*cursor + kSlotsPerLock, 2 * capacity_);
    for (; *cursor < end && count < capacity; ++*cursor) {
      const bool second_sweep = *cursor >= capacity_;
      const auto slot = static_cast<std::uint32_t>(*cursor % capacity_);
      if (slot >= (slot < main_.begin ? small_ : main_).next_unused) continue;
      const std::uint64_t key = key_of(slot_at(slot));
      if (layer_of_key(key) != layer_key) continue;
      const RowIndex::Entry entry = entry_of_slot(slot, RowIndex::hash(key));
      if (entry.bucket == nullptr) continue;
      const std::uint8_t hits = entry.bucket->hits[entry.position].load(std::memory_order_relaxed);
      if (is_hot(slot, hits) == second_sweep) continue;
      rows[count++] = row_of_key(key);
    }
  }
  return count;
}

RowCache::Usage RowCache::usage() {
  const std::lock_guard lock(mutex_);
  Usage usage;
  const std::uint64_t touched = (small_.next_unused - small_.begin) + std::uint64_t{main_.next_unused - main_.begin};
  usage.metadata_bytes = index_.bytes() + ghosts_.bytes() + touched * sizeof(std::uint64_t);
  usage.used_bytes = touched * stride_ + index_.bytes() + ghosts_.bytes();
  if (slots_.kind() == HugeMemory::Kind::hugetlb) usage.hugetlb_bytes = slots_.bytes();
  usage.rows = rows_;
  return usage;
}

}  // namespace engram

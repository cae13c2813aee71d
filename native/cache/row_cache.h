// The row cache: rows of one size, packed, in DRAM, under a byte budget that includes all of its metadata.
//
// Policy: S3-FIFO. A new row enters the small region (a twentieth of the slots); one that left it unread and is asked
// for again, or that was read twice there, enters the main region. Both regions are swept by a clock hand in slot
// order, which is FIFO order with reinsertion, without queues: a row with hits in the main region stays where it is and
// loses one hit.
//
// Readers (find_block, row) take no lock: they run inside an epoch (see epochs.h). Writers (admit) hold the mutex.
// A slot is rewritten only after every reader that could have found it has left its epoch.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "cache/epochs.h"
#include "cache/ghost_table.h"
#include "cache/row_index.h"
#include "cache/row_key.h"
#include "common/huge_memory.h"

namespace engram {

class RowCache {
 public:
  static constexpr std::uint32_t kBlockRows = 512;

  struct Options {
    std::uint64_t budget_bytes = 0;
    std::uint32_t row_bytes = 0;
    std::uint32_t readers = 1;
    // For simulations: keep keys only, with room for this many rows whatever the budget.
    std::uint64_t simulated_rows = 0;
  };
  struct Usage {
    std::uint64_t used_bytes = 0;  // touched slots and metadata
    std::uint64_t metadata_bytes = 0;
    std::uint64_t hugetlb_bytes = 0;
    std::uint64_t rows = 0;
  };

  explicit RowCache(const Options& options);

  // Rows that a cache of these options has room for.
  static std::uint64_t plan_capacity(const Options& options);

  // False where the memory could not be mapped.
  bool valid() const { return slots_.valid() && index_.valid() && ghosts_.valid(); }
  std::uint64_t capacity() const { return capacity_; }

  void enter(std::uint32_t reader) { epochs_.enter(reader); }
  void leave(std::uint32_t reader) { epochs_.leave(reader); }

  // Inside an epoch: slots[i] = slot + 1 of a candidate for keys[i], or 0. At most kBlockRows keys.
  void find_block(const std::uint64_t* keys, std::uint32_t count, std::uint32_t* slots) const;

  // Inside an epoch: the row of a candidate if it really has the key, else looks at the other candidates; nullptr =
  // miss.
  const std::uint8_t* row(std::uint32_t candidate, std::uint64_t key) const {
    const std::uint8_t* slot = slot_at(candidate - 1);
    if (key_of(slot) == key) [[likely]]
      return slot + sizeof(std::uint64_t);
    return find_exact(key);
  }
  // Where candidates' slots lie: a slot is the row's key, then the row.
  const std::uint8_t* slots() const { return slots_.data(); }
  std::uint32_t stride() const { return stride_; }

  // For simulations, which look up one key at a time.
  void prefetch_index(std::uint64_t key) const {
    if (capacity_ != 0) __builtin_prefetch(index_.first(RowIndex::hash(key)));
  }

  // Offers a row (row_bytes bytes). It may be dropped: where it is there already, or no slot is free just now.
  // `known_hot`: it goes where there is room, first to the main region, and has a hit to begin with (a saved heat list,
  // not a first read).
  void admit(std::uint64_t key, const std::uint8_t* row, bool known_hot = false);

  Usage usage();

  // Rows of a layer that are here, hottest first, in pieces: fills up to `capacity` rows and moves the cursor (0 to
  // begin); returns how many, 0 at the end. Rows that move meanwhile may be missed or come twice.
  std::uint64_t hot_rows(std::uint32_t layer_key, std::uint64_t* cursor, std::uint64_t* rows, std::uint64_t capacity);

 private:
  struct Retired {
    std::uint32_t slot;
    std::uint64_t stamp;
  };
  struct Region {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    std::uint32_t next_unused = 0;  // slots from here to end have never held a row
    std::uint32_t hand = 0;
    std::uint32_t reserve = 0;  // slots that are kept free or on their way to it
    std::vector<std::uint32_t> free;
    std::deque<Retired> limbo;
  };
  static constexpr std::uint32_t kNoSlot = 0xFFFFFFFF;
  static constexpr std::uint8_t kPromotionHits = 2;  // hits in the small region that lead to the main one

  static std::uint64_t index_buckets(std::uint64_t capacity);

  std::uint8_t* slot_at(std::uint32_t slot) const { return slots_.data() + std::uint64_t{slot} * stride_; }
  static std::uint64_t key_of(const std::uint8_t* slot) {
    std::uint64_t key;
    std::memcpy(&key, slot, sizeof key);
    return key;
  }
  const std::uint8_t* find_exact(std::uint64_t key) const;

  // Writer side; the mutex is held.
  RowIndex::Entry entry_of_slot(std::uint32_t slot, std::uint64_t hash) const;
  RowIndex::Entry make_entry(std::uint64_t hash);
  std::uint32_t allocate(Region& region);
  bool evict_one(Region& region);
  void retire(std::uint32_t slot);
  void reclaim(Region& region);
  bool is_hot(std::uint32_t slot, std::uint8_t hits) const {
    return hits >= (slot >= main_.begin ? 1 : kPromotionHits);
  }
  Region& region_of(std::uint32_t slot) { return slot < main_.begin ? small_ : main_; }

  std::uint32_t row_bytes_;  // stored per slot; 0 in simulations
  std::uint32_t stride_;
  std::uint64_t capacity_;
  HugeMemory slots_;
  RowIndex index_;
  GhostTable ghosts_;
  Epochs epochs_;
  std::mutex mutex_;
  Region small_;
  Region main_;
  std::uint64_t rows_ = 0;
};

}  // namespace engram

#include "cache/belady.h"

#include <bit>
#include <vector>

#include "cache/row_index.h"

namespace engram {
namespace {

// A set of positions with insertion, removal and the largest member in a handful of steps: bitmaps over bitmaps.
class PositionSet {
 public:
  explicit PositionSet(std::uint64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size);
    } while (size > 1);
  }

  bool contains(std::uint64_t position) const { return (levels_[0][position / 64] >> (position % 64) & 1) != 0; }
  void insert(std::uint64_t position) {
    for (auto& level : levels_) {
      level[position / 64] |= std::uint64_t{1} << (position % 64);
      position /= 64;
    }
  }
  void erase(std::uint64_t position) {
    for (auto& level : levels_) {
      level[position / 64] &= ~(std::uint64_t{1} << (position % 64));
      if (level[position / 64] != 0) return;
      position /= 64;
    }
  }
  // Of a set that is not empty.
  std::uint64_t largest() const {
    std::uint64_t position = 0;
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      position = position * 64 + static_cast<std::uint64_t>(std::bit_width((*level)[position])) - 1;
    }
    return position;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;
};

}  // namespace

void find_next_uses(const std::uint64_t* keys, std::uint64_t count, std::uint32_t* next) {
  // Backwards, with a hash table of the position where each key was seen last; open addressing, half full at most.
  const std::uint64_t slots = std::bit_ceil(2 * count + 2);
  std::vector<std::uint32_t> seen(slots, kNever);
  for (std::uint64_t position = count; position-- > 0;) {
    std::uint64_t slot = RowIndex::hash(keys[position]) & (slots - 1);
    while (seen[slot] != kNever && keys[seen[slot]] != keys[position]) slot = (slot + 1) & (slots - 1);
    next[position] = seen[slot];
    seen[slot] = static_cast<std::uint32_t>(position);
  }
}

std::uint64_t run_belady(const std::uint32_t* next, std::uint64_t count, std::uint64_t rows, std::uint8_t* missed) {
  // The cache's rows are known by the positions of their next uses: a look-up hits if its own position is among them,
  // and the row to give up is the one with the largest. Rows that are never used again are not kept.
  PositionSet kept(count);
  std::uint64_t kept_rows = 0;
  std::uint64_t misses = 0;
  for (std::uint64_t position = 0; position < count; ++position) {
    const bool hit = kept.contains(position);
    if (hit) {
      kept.erase(position);
      --kept_rows;
    }
    missed[position] = hit ? 0 : 1;
    misses += hit ? 0 : 1;
    if (next[position] == kNever) continue;
    kept.insert(next[position]);
    if (++kept_rows > rows) {
      kept.erase(kept.largest());
      --kept_rows;
    }
  }
  return misses;
}

}  // namespace engram

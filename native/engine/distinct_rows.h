// Finds the duplicates inside one batch: for each position, the position of the same row's first occurrence. Scratch of
// one worker.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace engram {

class DistinctRows {
 public:
  // first[i] = the first position with the id of position i (i itself where it is the first; unspecified for id -1).
  // first may be null. Returns the number of distinct ids other than -1.
  std::uint64_t find(const std::int64_t* ids, std::uint32_t count, std::uint32_t* first) {
    const std::uint32_t size = std::bit_ceil(std::max(16u, count * 2));
    if (table_.size() < size) table_.resize(size);
    std::fill_n(table_.begin(), size, 0u);
    const int shift = 64 - std::countr_zero(size);
    const auto home = [&](std::uint32_t i) {
      return static_cast<std::uint32_t>((static_cast<std::uint64_t>(ids[i]) * 0x9E3779B97F4A7C15ull) >> shift);
    };
    std::uint64_t distinct = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (i + kDistance < count) __builtin_prefetch(&table_[home(i + kDistance)], 1);
      if (ids[i] < 0) continue;
      std::uint32_t place = home(i);
      while (table_[place] != 0 && ids[table_[place] - 1] != ids[i]) place = (place + 1) & (size - 1);
      if (table_[place] == 0) {
        table_[place] = i + 1;
        ++distinct;
      }
      if (first != nullptr) first[i] = table_[place] - 1;
    }
    return distinct;
  }

 private:
  static constexpr std::uint32_t kDistance = 16;
  std::vector<std::uint32_t> table_;  // position + 1, or 0
};

}  // namespace engram

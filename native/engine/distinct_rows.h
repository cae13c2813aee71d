// Finds the duplicates inside one batch: for each position, the position of the same row's first occurrence. In steps,
// so that counting can give way to requests. Scratch of one worker.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace engram {

class DistinctRows {
 public:
  // Begins a batch of `count` ids.
  void begin(std::uint32_t count) {
    const std::uint32_t size = std::bit_ceil(std::max(16u, count * 2));
    if (table_.size() < size) table_.resize(size);
    std::fill_n(table_.begin(), size, 0u);
    mask_ = size - 1;
    shift_ = 64 - std::countr_zero(size);
  }

  // Takes positions begin .. end - 1, in order over all steps. first[i] = the first position with the id of position i
  // (i itself where it is the first; unspecified for id -1); first may be null. Returns the number of ids other than -1
  // that are new.
  std::uint64_t step(const std::int64_t* ids, std::uint32_t begin, std::uint32_t end, std::uint32_t* first) {
    std::uint64_t distinct = 0;
    for (std::uint32_t i = begin; i < end; ++i) {
      if (i + kDistance < end) __builtin_prefetch(&table_[home(ids[i + kDistance])], 1);
      if (ids[i] < 0) continue;
      std::uint32_t place = home(ids[i]);
      while (table_[place] != 0 && ids[table_[place] - 1] != ids[i]) place = (place + 1) & mask_;
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
  std::uint32_t home(std::int64_t id) const {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> shift_);
  }

  std::vector<std::uint32_t> table_;  // position + 1, or 0
  std::uint32_t mask_ = 0;
  int shift_ = 0;
};

}  // namespace engram

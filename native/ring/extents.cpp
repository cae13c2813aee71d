#include "ring/extents.h"

#include <algorithm>

namespace engram {

std::optional<uint64_t> ExtentAllocator::take(uint64_t bytes) {
  if (bytes > capacity_) return std::nullopt;
  if (bytes == 0) return 0;
  const uint64_t size = round_up(bytes);
  uint64_t begin = 0;
  std::size_t index = 0;
  while (index < count_ && extents_[index].begin - begin < size) begin = extents_[index++].end;
  // The last range need not end on the alignment, hence `bytes` and not `size`.
  if (index == count_ && (begin > capacity_ || capacity_ - begin < bytes)) return std::nullopt;
  if (count_ == extents_.size()) return std::nullopt;
  std::move_backward(extents_.begin() + index, extents_.begin() + count_, extents_.begin() + count_ + 1);
  extents_[index] = {begin, begin + size};
  ++count_;
  used_bytes_ += size;
  return begin;
}

void ExtentAllocator::give_back(uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  const auto end = extents_.begin() + count_;
  const auto extent =
      std::lower_bound(extents_.begin(), end, offset, [](const Extent& e, uint64_t value) { return e.begin < value; });
  if (extent == end || extent->begin != offset) return;
  used_bytes_ -= extent->end - extent->begin;
  std::move(extent + 1, end, extent);
  --count_;
}

}  // namespace engram

#include "ring/narrow_ids.h"

#include <algorithm>

namespace engram {

bool narrow_ids(const int64_t* ids, uint64_t count, int32_t* narrow) {
  constexpr uint64_t kBlock = 512;
  constexpr uint64_t kLinesAhead = 32;  // the worker's CPU holds them: asked for early, they come side by side
  constexpr uint64_t kIdsPerLine = 64 / sizeof(int32_t);
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const uint64_t end = std::min(count, begin + kBlock);
    for (uint64_t i = begin; i < end; i += kIdsPerLine) {
      if (i + kLinesAhead * kIdsPerLine < count) __builtin_prefetch(narrow + i + kLinesAhead * kIdsPerLine, 1);
    }
    uint64_t outside = 0;
    for (uint64_t i = begin; i < end; ++i) {
      const auto id = static_cast<int32_t>(ids[i]);
      narrow[i] = id;
      outside |= static_cast<uint64_t>(ids[i]) ^ static_cast<uint64_t>(static_cast<int64_t>(id));
    }
    if (outside != 0) return false;
  }
  return true;
}

}  // namespace engram

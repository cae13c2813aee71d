// ExtentAllocator: hands out ranges of the ids area or the arena, the lowest free one first, so that a reply is written
// where an earlier one was and still is in the CPU's cache. Not thread-safe: the session's lock guards it.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "engram/wire.h"

namespace engram {

class ExtentAllocator {
 public:
  static constexpr uint64_t kAlignment = 64;

  explicit ExtentAllocator(uint64_t capacity = 0) : capacity_(capacity) {}

  // The offset of a free range, or nothing where no gap is large enough. A range of 0 bytes takes no room.
  std::optional<uint64_t> take(uint64_t bytes);
  // Gives back what take returned.
  void give_back(uint64_t offset, uint64_t bytes);
  uint64_t used_bytes() const { return used_bytes_; }

 private:
  struct Extent {
    uint64_t begin;
    uint64_t end;
  };
  static uint64_t round_up(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  uint64_t capacity_;
  uint64_t used_bytes_ = 0;
  std::size_t count_ = 0;  // of the extents in use, sorted by offset; each slot has at most one
  std::array<Extent, ENGRAM_MAX_SLOTS> extents_;
};

}  // namespace engram

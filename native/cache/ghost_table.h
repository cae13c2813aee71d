// Remembers the keys of rows that left the cache unread, so that one that is asked for again is admitted for longer.
// A set-associative table of 4-byte entries (20 bits of fingerprint, 12 of age); the oldest of a set gives way.
// Approximate on purpose: a wrong answer costs a cache slot, never a row. Used by the cache's writer only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/huge_memory.h"

namespace engram {

class GhostTable {
 public:
  static constexpr std::size_t kSetEntries = 16;
  static constexpr std::size_t kSetBytes = kSetEntries * sizeof(std::uint32_t);

  // Remembers about `capacity` keys.
  explicit GhostTable(std::uint64_t capacity)
      : sets_((capacity + kSetEntries - 1) / kSetEntries),
        period_(capacity / kAgePeriods + 1),
        memory_(sets_ * kSetBytes) {}

  bool valid() const { return memory_.valid(); }
  std::size_t bytes() const { return memory_.bytes(); }

  void insert(std::uint64_t hash) {
    if (sets_ == 0) return;
    if (++inserted_in_period_ == period_) {
      inserted_in_period_ = 0;
      now_ = (now_ + 1) & kAgeMask;
    }
    std::uint32_t* set = set_of(hash);
    std::size_t victim = 0;
    std::uint32_t victim_age = 0;
    for (std::size_t i = 0; i < kSetEntries; ++i) {
      if (set[i] == 0) {
        victim = i;
        break;
      }
      const std::uint32_t age = (now_ - set[i]) & kAgeMask;
      if (age >= victim_age) {
        victim_age = age;
        victim = i;
      }
    }
    set[victim] = fingerprint(hash) | now_;
  }

  // True where the key was remembered; it is forgotten by the call.
  bool take(std::uint64_t hash) {
    if (sets_ == 0) return false;
    std::uint32_t* set = set_of(hash);
    const std::uint32_t wanted = fingerprint(hash);
    for (std::size_t i = 0; i < kSetEntries; ++i) {
      if ((set[i] & ~kAgeMask) != wanted) continue;
      const std::uint32_t age = (now_ - set[i]) & kAgeMask;
      set[i] = 0;
      if (age <= kAgePeriods) return true;
    }
    return false;
  }

 private:
  static constexpr std::uint32_t kAgeMask = 0xFFF;
  // A key is forgotten after this many periods, i.e. `capacity` insertions. Half the age range, so that ages never wrap
  // while an entry can still be found.
  static constexpr std::uint32_t kAgePeriods = 2048;

  std::uint32_t* set_of(std::uint64_t hash) const {
    const auto index = static_cast<std::size_t>(((hash >> 32) * sets_) >> 32);
    return reinterpret_cast<std::uint32_t*>(memory_.data()) + index * kSetEntries;
  }
  // Never 0, so that 0 means an empty entry.
  static std::uint32_t fingerprint(std::uint64_t hash) {
    const auto bits = static_cast<std::uint32_t>(hash) & ~kAgeMask;
    return bits != 0 ? bits : ~kAgeMask;
  }

  std::uint64_t sets_;
  std::uint64_t period_;
  HugeMemory memory_;
  std::uint64_t inserted_in_period_ = 0;
  std::uint32_t now_ = 0;
};

}  // namespace engram

// For this class's own files: atomic access to words in memory that the daemon shares.
#pragma once
#include <atomic>
#include <cstdint>

#include "engram/wire.h"
#include "ring/futex.h"

namespace engram {

constexpr int64_t kSliceNs = 5'000'000;  // the longest sleep without a look at the daemon's life
constexpr int64_t kSlotBits = 8;         // of a ticket; the rest is the serial
static_assert(ENGRAM_MAX_SLOTS == 1 << kSlotBits);

template <typename Word>
std::atomic_ref<Word> atomic(const Word& word) {
  return std::atomic_ref<Word>(const_cast<Word&>(word));
}

// Absolute time of a relative limit; negative limits never end.
inline int64_t deadline_ns(int32_t timeout_ms) {
  return timeout_ms < 0 ? INT64_MAX : monotonic_ns() + int64_t{timeout_ms} * 1'000'000;
}

}  // namespace engram

// The fewest misses that a cache of a given size can have on a given sequence: Belady's MIN (Belady, "A study of
// replacement algorithms for a virtual-storage computer", 1966) with the freedom not to keep a row.
#pragma once

#include <cstdint>
#include <optional>

namespace engram {

constexpr std::uint32_t kNever = 0xFFFFFFFF;

// next[i] = position of the next look-up of keys[i], or kNever. count < kNever. Throws std::bad_alloc.
void find_next_uses(const std::uint64_t* keys, std::uint64_t count, std::uint32_t* next);

// missed[i] = 1 where the look-up at i misses in a cache of `rows`; returns the misses. Throws std::bad_alloc.
std::uint64_t run_belady(const std::uint32_t* next, std::uint64_t count, std::uint64_t rows, std::uint8_t* missed);

}  // namespace engram

// Which rows are in a sample: those whose hash lies below a threshold. The hash is another one than the cache index's,
// or a sampled cache would use a part of its buckets only.
#pragma once

#include <cstdint>

#include "cache/row_key.h"

namespace engram {

constexpr std::uint64_t kSampleAll = std::uint64_t{1} << 32;

// What a layer adds to its rows' hashes.
inline std::uint32_t sample_salt(std::uint32_t layer_key) {
  return layer_key * 0x9E3779B1u;
}

// A mixed 32-bit hash of a row (the multipliers are xxHash's primes). Branch-free, so that compilers vectorise loops
// over it.
inline std::uint32_t sample_hash(std::uint32_t salt, std::uint64_t row) {
  auto hash = static_cast<std::uint32_t>(row) ^ salt ^ static_cast<std::uint32_t>(row >> 32) * 0x27D4EB2Fu;
  hash *= 0x85EBCA77u;
  hash ^= hash >> 15;
  hash *= 0xC2B2AE3Du;
  return hash;
}

inline std::uint32_t sample_hash_of_key(std::uint64_t key) {
  return sample_hash(sample_salt(layer_of_key(key)), row_of_key(key));
}

}  // namespace engram

// What stands for a row in caches and samples: its layer's number (1 .. 2^24 - 1, in the engine the layer's handle, so
// that it is unique over layers and generations) and its id, in one word.
#pragma once

#include <cstdint>

namespace engram {

constexpr std::uint32_t kKeyRowBits = 40;
constexpr std::uint64_t kMaxKeyRows = std::uint64_t{1} << kKeyRowBits;

constexpr std::uint64_t row_of_key(std::uint64_t key) {
  return key & (kMaxKeyRows - 1);
}

constexpr std::uint32_t layer_of_key(std::uint64_t key) {
  return static_cast<std::uint32_t>(key >> kKeyRowBits);
}

// Of a row beyond the bits the upper ones are ignored: -1 makes a key that no row of a table has.
constexpr std::uint64_t row_key(std::uint32_t layer_key, std::uint64_t row) {
  return std::uint64_t{layer_key} << kKeyRowBits | row_of_key(row);
}

}  // namespace engram

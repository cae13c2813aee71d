// Rows of synthetic checkpoints: splitmix64 of (seed, layer, row, word). The formula is in docs/table_format.md.
#include <array>
#include <cstddef>
#include <cstring>

#include "common/splitmix64.h"
#include "engram/pages.h"

namespace engram {
namespace {

constexpr uint64_t kLow = 0x0101010101010101;

// Clears bit 0x40 of every byte 0x7F or 0xFF, the two NaNs of FP8 E4M3. Adding 1 to the low seven bits reaches bit 7
// only from 0x7F, and never carries into the next byte.
constexpr uint64_t without_nans(uint64_t word) {
  const uint64_t is_nan = ((word & (kLow * 0x7F)) + kLow) & (kLow * 0x80);
  return word & ~(is_nan >> 1);
}

constexpr std::array<uint8_t, 256> make_scales() {
  std::array<uint8_t, 256> scales{};
  for (size_t x = 0; x < 256; x++) scales[x] = static_cast<uint8_t>(107 + x % 21);
  return scales;
}
constexpr auto kScales = make_scales();

// One 8-byte word of a row whose scale part begins at byte value_bytes.
uint64_t row_word(uint64_t base, uint32_t index, uint32_t value_bytes) {
  const uint64_t word = splitmix64(base + (uint64_t{index} + 1) * kSplitmixGamma);
  const uint32_t begin = index * 8;
  if (begin + 8 <= value_bytes) return without_nans(word);
  uint8_t raw[8], values[8];
  std::memcpy(raw, &word, 8);
  const uint64_t fixed = without_nans(word);
  std::memcpy(values, &fixed, 8);
  for (uint32_t i = 0; i < 8; i++) raw[i] = begin + i < value_bytes ? values[i] : kScales[raw[i]];
  uint64_t result;
  std::memcpy(&result, raw, 8);
  return result;
}

}  // namespace
}  // namespace engram

extern "C" int engram_synth_rows(uint64_t seed, uint32_t layer, uint64_t first_row, uint64_t row_count,
                                 uint32_t value_bytes, uint32_t begin, uint32_t end, void* out) {
  using namespace engram;
  if (begin > end || end > ENGRAM_MAX_ROW_BYTES || value_bytes > ENGRAM_MAX_ROW_BYTES) return -1;
  if (first_row + row_count < first_row) return -1;
  if (row_count == 0 || begin == end) return 0;
  if (out == nullptr) return -1;
  const uint64_t layer_base = splitmix64(splitmix64(seed + kSplitmixGamma) + layer + kSplitmixGamma);
  const uint32_t first_whole = (begin + 7) / 8, end_whole = end / 8;
  uint8_t* at = static_cast<uint8_t*>(out);
  const auto partial = [&](uint64_t base, uint32_t from, uint32_t to) {  // bytes inside one word
    const uint64_t word = row_word(base, from / 8, value_bytes);
    std::memcpy(at, reinterpret_cast<const uint8_t*>(&word) + from % 8, to - from);
    at += to - from;
  };
  for (uint64_t row = first_row; row < first_row + row_count; row++) {
    const uint64_t base = splitmix64(layer_base + row + kSplitmixGamma);
    if (first_whole > end_whole) {  // begins and ends inside one word
      partial(base, begin, end);
      continue;
    }
    if (begin % 8 != 0) partial(base, begin, first_whole * 8);
    uint32_t index = first_whole;
    for (; index < end_whole && index * 8 + 8 <= value_bytes; index++, at += 8) {
      const uint64_t word = without_nans(splitmix64(base + (uint64_t{index} + 1) * kSplitmixGamma));
      std::memcpy(at, &word, 8);
    }
    for (; index < end_whole; index++, at += 8) {
      const uint64_t word = row_word(base, index, value_bytes);
      std::memcpy(at, &word, 8);
    }
    if (end % 8 != 0) partial(base, end_whole * 8, end);
  }
  return 0;
}

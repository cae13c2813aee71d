// Synthetic rows against a byte-by-byte reference written from docs/table_format.md.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "engram/pages.h"

namespace {

using Bytes = std::vector<uint8_t>;

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

uint8_t reference(uint64_t seed, uint32_t layer, uint64_t row, uint32_t value_bytes, uint32_t byte) {
  const uint64_t g = 0x9E3779B97F4A7C15;
  const uint64_t base = mix(mix(mix(seed + g) + layer + g) + row + g);
  const uint8_t raw = static_cast<uint8_t>(mix(base + (byte / 8 + 1) * g) >> (8 * (byte % 8)));
  if (byte >= value_bytes) return static_cast<uint8_t>(107 + raw % 21);
  return raw == 0x7F || raw == 0xFF ? static_cast<uint8_t>(raw & ~0x40) : raw;
}

Bytes synth(uint64_t seed, uint32_t layer, uint64_t first, uint64_t rows, uint32_t value_bytes, uint32_t begin,
            uint32_t end) {
  Bytes out(rows * (end - begin));
  REQUIRE(engram_synth_rows(seed, layer, first, rows, value_bytes, begin, end, out.data()) == 0);
  return out;
}

}  // namespace

TEST_CASE("splitmix64's own first output, so that mix and its increment are the published ones") {
  // The generator seeded with 0 gives mix(G) first: 0xE220A8397B1DCDAF in every public implementation.
  CHECK(mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF);
}

TEST_CASE("any part of any row equals the reference") {
  for (uint32_t value_bytes : {0u, 1u, 7u, 8u, 13u, 16u, 256u, 300u}) {
    for (uint32_t begin : {0u, 1u, 7u, 8u, 9u, 255u, 256u, 257u}) {
      for (uint32_t length : {0u, 1u, 3u, 7u, 8u, 9u, 16u, 17u, 64u}) {
        const Bytes out = synth(7, 14, 1000, 3, value_bytes, begin, begin + length);
        for (uint32_t i = 0; i < out.size(); i++) {
          REQUIRE(out[i] == reference(7, 14, 1000 + i / length, value_bytes, begin + i % length));
        }
      }
    }
  }
}

TEST_CASE("seeds, layers and rows over their whole range") {
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
    for (uint32_t layer : {0u, 1u, 0x7FFFFFFFu}) {
      for (uint64_t row : {uint64_t{0}, uint64_t{384006167}, (uint64_t{1} << 40) - 1}) {
        const Bytes out = synth(seed, layer, row, 1, 256, 0, 264);
        for (uint32_t i = 0; i < 264; i++) REQUIRE(out[i] == reference(seed, layer, row, 256, i));
      }
    }
  }
}

TEST_CASE("no value is a NaN, every scale is 107 .. 127, and all other bytes occur") {
  const Bytes values = synth(1, 1, 0, 4096, 256, 0, 256), scales = synth(1, 1, 0, 4096, 256, 256, 264);
  size_t counts[256] = {}, scale_counts[256] = {};
  for (uint8_t byte : values) counts[byte]++;
  for (uint8_t byte : scales) scale_counts[byte]++;
  for (int byte = 0; byte < 256; byte++) {
    CHECK((counts[byte] == 0) == (byte == 0x7F || byte == 0xFF));
    CHECK((scale_counts[byte] != 0) == (byte >= 107 && byte <= 127));
  }
}

TEST_CASE("bad arguments") {
  uint8_t out[8];
  CHECK(engram_synth_rows(0, 0, 0, 1, 8, 5, 4, out) == -1);
  CHECK(engram_synth_rows(0, 0, 0, 1, 8, 0, 65537, out) == -1);
  CHECK(engram_synth_rows(0, 0, 0, 1, 65537, 0, 8, out) == -1);
  CHECK(engram_synth_rows(0, 0, 0, 1, 8, 0, 8, nullptr) == -1);
  CHECK(engram_synth_rows(0, 0, UINT64_MAX, 2, 8, 0, 8, out) == -1);
  CHECK(engram_synth_rows(0, 0, 0, 0, 8, 0, 8, nullptr) == 0);
}

// CRC32C against published vectors, a bit-by-bit reference, and itself by other ways.
#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "common/crc32c.h"

namespace {

using Bytes = std::vector<uint8_t>;

// The definition: one bit at a time.
uint32_t reference(uint32_t crc, const uint8_t* bytes, size_t count) {
  crc = ~crc;
  for (size_t i = 0; i < count; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

Bytes random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

}  // namespace

TEST_CASE("vectors of RFC 3720, B.4, and the check value of the CRC catalogue") {
  Bytes zeros(32, 0), ones(32, 0xFF), up(32), down(32);
  for (uint8_t i = 0; i < 32; i++) {
    up[i] = i;
    down[i] = static_cast<uint8_t>(31 - i);
  }
  for (auto* crc : {&engram::crc32c, &engram::crc32c_portable}) {
    CHECK(crc(0, zeros.data(), 32) == 0x8A9136AA);
    CHECK(crc(0, ones.data(), 32) == 0x62A8AB43);
    CHECK(crc(0, up.data(), 32) == 0x46DD794E);
    CHECK(crc(0, down.data(), 32) == 0x113FDB5C);
    CHECK(crc(0, "123456789", 9) == 0xE3069283);
    CHECK(crc(0, nullptr, 0) == 0);
  }
}

TEST_CASE("all lengths and alignments equal the definition") {
  const Bytes bytes = random_bytes(700, 1);
  for (size_t begin = 0; begin < 9; begin++) {
    for (size_t count = 0; count < 600; count += count < 80 ? 1 : 37) {
      const uint32_t expected = reference(0x12345678, bytes.data() + begin, count);
      REQUIRE(engram::crc32c(0x12345678, bytes.data() + begin, count) == expected);
      REQUIRE(engram::crc32c_portable(0x12345678, bytes.data() + begin, count) == expected);
    }
  }
}

TEST_CASE("a string in pieces has the checksum of the whole") {
  const Bytes bytes = random_bytes(4096, 2);
  const uint32_t whole = engram::crc32c(0, bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); cut += 13) {
    const uint32_t front = engram::crc32c(0, bytes.data(), cut);
    REQUIRE(engram::crc32c(front, bytes.data() + cut, bytes.size() - cut) == whole);
  }
}

TEST_CASE("powers of x are what zero bytes do to a checksum's register") {
  // The register after n zero bytes, from the register of x^0, is x^(8n).
  for (size_t count : {0u, 1u, 5u, 8u, 88u, 4096u}) {
    const Bytes zeros(count, 0);
    CHECK(engram::crc32c_power(8 * count) == ~reference(~0x80000000u, zeros.data(), count));
  }
  CHECK(engram::crc32c_power(1) == 0x40000000);
  CHECK(engram::crc32c_power(31) == 1);
  CHECK(engram::crc32c_power(32) == 0x82F63B78);
}

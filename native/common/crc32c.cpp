#include "common/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace engram {
namespace {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian and read in place");

constexpr uint32_t kPolynomial = 0x82F63B78;  // Castagnoli, reflected: bit 31 is x^0

// tables[k][b]: the effect of byte b followed by k zero bytes (slicing by eight).
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; byte++) {
    for (size_t k = 1; k < 8; k++) tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xFF];
  }
  return tables;
}

constexpr auto kTables = make_tables();

#if defined(__x86_64__)
// All steps take and give the inverted register, so that they chain without inverting in between.
__attribute__((target("sse4.2,crc32"))) uint32_t update_sse42(uint32_t state, const uint8_t* bytes, size_t count) {
  uint64_t wide = state;
  for (; count >= 8; bytes += 8, count -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  state = static_cast<uint32_t>(wide);
  for (; count > 0; bytes++, count--) state = _mm_crc32_u8(state, *bytes);
  return state;
}
#elif defined(__aarch64__)
__attribute__((target("+crc"))) uint32_t update_arm(uint32_t state, const uint8_t* bytes, size_t count) {
  for (; count >= 8; bytes += 8, count -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    state = __crc32cd(state, word);
  }
  for (; count > 0; bytes++, count--) state = __crc32cb(state, *bytes);
  return state;
}

bool has_arm_crc32() {
#if defined(__ARM_FEATURE_CRC32)
  return true;
#else
  constexpr unsigned long kHwcapCrc32 = 1UL << 7;  // HWCAP_CRC32 of asm/hwcap.h
  static const bool has = (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
  return has;
#endif
}
#endif

// Product of two polynomials modulo the polynomial, reflected.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; bit--) {
    if ((a >> bit) & 1) product ^= b;            // bit 31 - i of a is x^i: add b * x^i
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);  // b *= x
  }
  return product;
}

}  // namespace

uint32_t crc32c_power(uint64_t exponent) {
  uint32_t result = 0x80000000;  // x^0
  uint32_t square = 0x40000000;  // x^1
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

uint32_t crc32c_portable(uint32_t crc, const void* bytes, size_t count) {
  const uint8_t* at = static_cast<const uint8_t*>(bytes);
  uint32_t state = ~crc;
  for (; count >= 8; at += 8, count -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= state;
    state = kTables[7][word & 0xFF] ^ kTables[6][(word >> 8) & 0xFF] ^ kTables[5][(word >> 16) & 0xFF] ^
            kTables[4][(word >> 24) & 0xFF] ^ kTables[3][(word >> 32) & 0xFF] ^ kTables[2][(word >> 40) & 0xFF] ^
            kTables[1][(word >> 48) & 0xFF] ^ kTables[0][word >> 56];
  }
  for (; count > 0; at++, count--) state = (state >> 8) ^ kTables[0][(state ^ *at) & 0xFF];
  return ~state;
}

uint32_t crc32c(uint32_t crc, const void* bytes, size_t count) {
#if defined(__x86_64__)
  if (has_crc32c_instructions()) return ~update_sse42(~crc, static_cast<const uint8_t*>(bytes), count);
#elif defined(__aarch64__)
  if (has_arm_crc32()) return ~update_arm(~crc, static_cast<const uint8_t*>(bytes), count);
#endif
  return crc32c_portable(crc, bytes, count);
}

}  // namespace engram

#include "pages/page_codec.h"

#include "common/crc32c.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#include <wmmintrin.h>
#endif

namespace engram {
namespace {

#if defined(__x86_64__)
// One crc32 instruction takes three cycles but another can start every cycle, so a row is read as three streams: the
// first (with the row id in front and the odd words) continues the seed, the others start from zero. The three are
// joined by carry-less multiplication: clmul(c, x^(8n - 33)) is 64 bits whose CRC is c moved past n bytes (32 from the
// CRC's own shift by a word's upper half, 1 from the bit that a reflected product falls short of 64).
__attribute__((target("sse4.2,crc32,pclmul"))) uint32_t row_crc_x86(const RowSeed& seed, uint64_t row,
                                                                    const uint8_t* bytes) {
  const uint32_t words = seed.row_bytes / 8;
  const uint32_t third = seed.stream_words;
  const uint32_t first = words - 2 * third;  // third .. third + 2 words
  const auto word = [bytes](uint32_t index) {
    uint64_t value;
    std::memcpy(&value, bytes + size_t{8} * index, 8);
    return value;
  };
  uint64_t a = _mm_crc32_u64(~seed.crc, row);
  if (third == 0) {
    for (uint32_t i = 0; i < words; i++) a = _mm_crc32_u64(a, word(i));
  } else {
    uint64_t b = 0, c = 0;
    uint32_t odd = 0;
    for (; odd < first - third; odd++) a = _mm_crc32_u64(a, word(odd));
    for (uint32_t i = 0; i < third; i++) {
      a = _mm_crc32_u64(a, word(odd + i));
      b = _mm_crc32_u64(b, word(odd + third + i));
      c = _mm_crc32_u64(c, word(odd + 2 * third + i));
    }
    const __m128i past_two = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(a)),
                                                  _mm_cvtsi64_si128(static_cast<int64_t>(seed.shift_two)), 0);
    const __m128i past_one = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(b)),
                                                  _mm_cvtsi64_si128(static_cast<int64_t>(seed.shift_one)), 0);
    a = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(past_two, past_one)))) ^ c;
  }
  uint32_t state = static_cast<uint32_t>(a);
  for (uint32_t i = words * 8; i < seed.row_bytes; i++) state = _mm_crc32_u8(state, bytes[i]);
  return ~state;
}
#endif

}  // namespace

RowSeed make_row_seed(const engram_page_format& format) {
  uint8_t address[32] = {};  // table id | generation | layer | zero
  std::memcpy(address, format.table_id, 16);
  std::memcpy(address + 16, &format.generation, 8);
  std::memcpy(address + 24, &format.layer, 4);
  RowSeed seed;
  seed.crc = crc32c(0, address, sizeof address);
  seed.row_bytes = format.row_bytes;
  seed.stream_words = format.row_bytes / 24;
  if (seed.stream_words != 0) {
    seed.shift_one = crc32c_power(uint64_t{64} * seed.stream_words - 33);
    seed.shift_two = crc32c_power(uint64_t{128} * seed.stream_words - 33);
  }
  return seed;
}

uint32_t row_checksum(const RowSeed& seed, uint64_t row, const uint8_t* bytes) {
  uint32_t crc;
#if defined(__x86_64__)
  if (has_crc32c_instructions()) {
    crc = row_crc_x86(seed, row, bytes);
    return crc != 0 ? crc : 1;
  }
#endif
  crc = crc32c(crc32c(seed.crc, &row, sizeof row), bytes, seed.row_bytes);
  return crc != 0 ? crc : 1;
}

}  // namespace engram

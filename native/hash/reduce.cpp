#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__)
#define ENGRAM_HASH_X86 1
#include <immintrin.h>
#endif

namespace engram::hash {
namespace {

__extension__ typedef unsigned __int128 uint128;

// Integer way, exact for every int64 x and 1 <= d < 2^31.
// For u in 0 .. 2^64 - 1 and m = floor((2^64 - 1) / d): 2^64 / d - 1 <= m < 2^64 / d, because 2^64 - 1 - m * d < d.
// Hence u / d - u / 2^64 <= u * m / 2^64 <= u / d, so the estimate q = floor(u * m / 2^64) is floor(u / d) or one less,
// and u - q * d lies in 0 .. 2 * d - 1: one conditional subtraction finishes.
// A negative x is folded to u = ~x = -x - 1 >= 0: floormod(x, d) = d - 1 - (u mod d).
void reduce_integer(const int64_t* rolling, size_t count, const ColumnBlock& block, int32_t* out, size_t stride) {
  for (size_t t = 0; t < count; ++t) {
    const uint64_t sign = rolling[t] < 0 ? ~uint64_t{0} : 0;
    const uint64_t u = static_cast<uint64_t>(rolling[t]) ^ sign;
    for (size_t c = 0; c < block.columns; ++c) {
      const uint32_t size = block.size[c];
      const auto quotient = static_cast<uint64_t>((uint128{u} * block.reciprocal[c]) >> 64);
      auto remainder = static_cast<uint32_t>(u - quotient * size);  // below 2 * size < 2^32
      remainder = std::min(remainder, remainder - size);            // wraps high where remainder < size
      remainder = sign != 0 ? size - 1 - remainder : remainder;
      out[t * stride + c] = static_cast<int32_t>(remainder + block.offset[c]);
    }
  }
}

// Floating way, exact for every int64 x and 2^13 <= d < 2^31, in round-to-nearest mode.
// fma(double(x), 1 / d, M) with M = 1.5 * 2^52 lands in [2^52, 2^53), where doubles are the integers, since
// |x / d| <= 2^50 (plus 1/4): so it equals M + q for an integer q, and the low 32 bits of its mantissa are q modulo
// 2^32 (M's own low 32 bits are 0). Errors: double(x) and 1 / d are each off by a factor 1 +- 2^-53, which moves the
// product by at most 2^63 / d * (2^-52 + 2^-106) <= 2^-2 + 2^-56; the fma rounds once, by at most 1/2. So
// |q - x / d| < 1, and r = x - q * d lies in -(d - 1) .. d - 1. That fits 32 bits, so r is taken modulo 2^32 from the
// low halves of x, q and d alone. A negative r is at least 2^32 - d + 1 > 2^31 as unsigned and r + d wraps to the
// remainder; for r >= 0, r <= r + d < 2^32. Either way the floored remainder is min(r, r + d).
constexpr int64_t kSmallestFloatingSize = int64_t{1} << 13;

// Volatile additions tell the rounding mode as the vector unit sees it: 2^52 + 3/4 rules out rounding down and to
// zero, 2^52 + 1/4 rules out rounding up.
bool rounds_to_nearest() {
  const volatile double base = 4503599627370496.0;
  const volatile double high = base + 0.75;
  const volatile double low = base + 0.25;
  return high == 4503599627370497.0 && low == 4503599627370496.0;
}

#ifdef ENGRAM_HASH_X86
constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52

__attribute__((target("avx2,fma"))) inline void store_columns(__m256i rows, size_t columns, int32_t* out) {
  if (columns == kBlockColumns) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rows);
    return;
  }
  alignas(32) std::array<int32_t, kBlockColumns> all;
  _mm256_store_si256(reinterpret_cast<__m256i*>(all.data()), rows);
  std::memcpy(out, all.data(), columns * sizeof(int32_t));
}

// A version with 512-bit registers was measured and brought nothing over this one.
__attribute__((target("avx2,fma"))) void reduce_avx2(const int64_t* rolling, size_t count, const ColumnBlock& block,
                                                     int32_t* out, size_t stride) {
  // Columns 0 1 4 5 and 2 3 6 7: the shuffle below, which works within 128-bit halves, puts them back in order.
  const auto& inverse = block.inverse;
  const auto& size = block.size;
  const __m256d inverse_a = _mm256_setr_pd(inverse[0], inverse[1], inverse[4], inverse[5]);
  const __m256d inverse_b = _mm256_setr_pd(inverse[2], inverse[3], inverse[6], inverse[7]);
  const __m256i size_a = _mm256_setr_epi64x(size[0], size[1], size[4], size[5]);
  const __m256i size_b = _mm256_setr_epi64x(size[2], size[3], size[6], size[7]);
  const __m256i sizes = _mm256_load_si256(reinterpret_cast<const __m256i*>(size.data()));
  const __m256i offsets = _mm256_load_si256(reinterpret_cast<const __m256i*>(block.offset.data()));
  const __m256d magic = _mm256_set1_pd(kMagic);
  const size_t columns = block.columns;
  for (size_t t = 0; t < count; ++t) {
    const __m256d x = _mm256_set1_pd(static_cast<double>(rolling[t]));
    const __m256i q_a = _mm256_castpd_si256(_mm256_fmadd_pd(x, inverse_a, magic));
    const __m256i q_b = _mm256_castpd_si256(_mm256_fmadd_pd(x, inverse_b, magic));
    const __m256 product_a = _mm256_castsi256_ps(_mm256_mul_epu32(q_a, size_a));
    const __m256 product_b = _mm256_castsi256_ps(_mm256_mul_epu32(q_b, size_b));
    const __m256i product = _mm256_castps_si256(_mm256_shuffle_ps(product_a, product_b, 0x88));
    const __m256i r = _mm256_sub_epi32(_mm256_set1_epi32(static_cast<int32_t>(rolling[t])), product);
    const __m256i remainder = _mm256_min_epu32(r, _mm256_add_epi32(r, sizes));
    store_columns(_mm256_add_epi32(remainder, offsets), columns, out + t * stride);
  }
}
#endif

}  // namespace

ColumnBlock::ColumnBlock(const int64_t* sizes, const int64_t* offsets, size_t columns) : columns(columns) {
  for (size_t c = 0; c < kBlockColumns; ++c) {
    size[c] = c < columns ? static_cast<uint32_t>(sizes[c]) : 1;
    offset[c] = c < columns ? static_cast<uint32_t>(offsets[c]) : 0;
    inverse[c] = 1.0 / static_cast<double>(size[c]);
    reciprocal[c] = std::numeric_limits<uint64_t>::max() / size[c];
  }
}

Reducers usable_reducers() {
  Reducers usable{};
  usable.list[usable.count++] = {"integer", reduce_integer, 1};
#ifdef ENGRAM_HASH_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    usable.list[usable.count++] = {"avx2", reduce_avx2, kSmallestFloatingSize};
  }
#endif
  return usable;
}

ReduceFunction choose_reducer(int64_t smallest_size) {
  const Reducers usable = usable_reducers();
  const bool floating = smallest_size >= kSmallestFloatingSize && rounds_to_nearest();
  return usable.list[floating ? usable.count - 1 : 0].run;
}

}  // namespace engram::hash

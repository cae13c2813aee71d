#include "cache/sample_filter.h"

#include <bit>

#include "cache/row_sample.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace engram {
namespace {

std::uint32_t filter_portable(const std::int64_t* ids, std::uint32_t begin, std::uint32_t count, std::uint32_t salt,
                              std::uint32_t limit, std::uint16_t* positions) {
  std::uint32_t found = 0;
  for (std::uint32_t i = begin; i < count; ++i) {
    if (sample_hash(salt, static_cast<std::uint64_t>(ids[i])) > limit || ids[i] < 0) continue;
    positions[found++] = static_cast<std::uint16_t>(i);
  }
  return found;
}

#if defined(__x86_64__)
// The same, eight ids at a time.
__attribute__((target("avx2"))) std::uint32_t filter_avx2(const std::int64_t* ids, std::uint32_t count,
                                                          std::uint32_t salt, std::uint32_t limit,
                                                          std::uint16_t* positions) {
  const __m256i salts = _mm256_set1_epi32(static_cast<int>(salt));
  const __m256i limits = _mm256_set1_epi32(static_cast<int>(limit));
  const __m256i high_factor = _mm256_set1_epi32(0x27D4EB2F);
  const __m256i first_factor = _mm256_set1_epi32(static_cast<int>(0x85EBCA77u));
  const __m256i second_factor = _mm256_set1_epi32(static_cast<int>(0xC2B2AE3Du));
  std::uint32_t found = 0;
  std::uint32_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 front = _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + i)));
    const __m256 back = _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + i + 4)));
    // Low and high halves of the ids; both in the order 0 1 4 5 2 3 6 7 until the mask is taken.
    const __m256i low = _mm256_castps_si256(_mm256_shuffle_ps(front, back, 0x88));
    const __m256i high = _mm256_castps_si256(_mm256_shuffle_ps(front, back, 0xDD));
    __m256i hash = _mm256_xor_si256(_mm256_xor_si256(low, salts), _mm256_mullo_epi32(high, high_factor));
    hash = _mm256_mullo_epi32(hash, first_factor);
    hash = _mm256_xor_si256(hash, _mm256_srli_epi32(hash, 15));
    hash = _mm256_mullo_epi32(hash, second_factor);
    const __m256i below = _mm256_cmpeq_epi32(_mm256_min_epu32(hash, limits), hash);
    const __m256i wanted = _mm256_andnot_si256(_mm256_srai_epi32(high, 31), below);
    const __m256i in_order = _mm256_permute4x64_epi64(wanted, 0xD8);
    auto mask = static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(in_order)));
    for (; mask != 0; mask &= mask - 1) {
      positions[found++] = static_cast<std::uint16_t>(i + static_cast<std::uint32_t>(std::countr_zero(mask)));
    }
  }
  return found + filter_portable(ids, i, count, salt, limit, positions + found);
}
#endif

}  // namespace

std::uint32_t filter_sample(const std::int64_t* ids, std::uint32_t count, std::uint32_t salt, std::uint32_t limit,
                            std::uint16_t* positions) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return filter_avx2(ids, count, salt, limit, positions);
#endif
  return filter_portable(ids, 0, count, salt, limit, positions);
}

}  // namespace engram

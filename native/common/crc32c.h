// CRC32C (Castagnoli) of byte strings, with the fastest instructions that the machine has, and the arithmetic to join
// the checksums of neighbouring strings. Pure functions; safe from any number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace engram {

// CRC32C of `count` bytes, continuing from `crc` (0 to begin): crc32c(crc32c(0, a), b) is the checksum of a followed by
// b.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t count);

// The same by tables alone, as on machines without CRC instructions. For tests, and for whoever wants to compare.
uint32_t crc32c_portable(uint32_t crc, const void* bytes, size_t count);

// x^exponent modulo the polynomial, in the checksum's reflected bit order.
uint32_t crc32c_power(uint64_t exponent);

#if defined(__x86_64__)
// Whether crc32 and carry-less multiplication may be used; one load and a bit test.
inline bool has_crc32c_instructions() {
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}
#endif

}  // namespace engram

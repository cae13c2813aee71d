// Finds the head sizes: the primes from vocab_size up, handed out in order.
#include <array>
#include <cstdint>
#include <limits>

#include "engram/hash.h"

namespace {

__extension__ typedef unsigned __int128 uint128;

// The first twelve primes as Miller-Rabin bases decide every n below 3.3e24 (Sorenson and Webster, "Strong
// pseudoprimes to twelve prime bases", 2015), so every int64.
constexpr std::array<uint64_t, 12> kBases = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};

uint64_t multiply_modulo(uint64_t a, uint64_t b, uint64_t modulus) {
  return static_cast<uint64_t>(uint128{a} * b % modulus);
}

uint64_t power_modulo(uint64_t base, uint64_t exponent, uint64_t modulus) {
  uint64_t result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = multiply_modulo(result, base, modulus);
    base = multiply_modulo(base, base, modulus);
  }
  return result;
}

// n odd, above every base and divisible by none. True where `base` proves n composite.
bool is_witness(uint64_t base, uint64_t n) {
  const int twos = __builtin_ctzll(n - 1);
  uint64_t x = power_modulo(base, (n - 1) >> twos, n);
  if (x == 1 || x == n - 1) return false;
  for (int i = 1; i < twos; ++i) {
    x = multiply_modulo(x, x, n);
    if (x == n - 1) return false;
  }
  return true;
}

bool is_prime(uint64_t n) {
  if (n < 2) return false;
  for (const uint64_t base : kBases) {
    if (n % base == 0) return n == base;
  }
  for (const uint64_t base : kBases) {
    if (is_witness(base, n)) return false;
  }
  return true;
}

}  // namespace

// Every place restarts at the same number and takes the smallest primes not yet used, so the used primes are always
// an unbroken run from vocab_size up: one forward scan gives the same primes without looking back.
extern "C" int engram_head_sizes(int64_t vocab_size, uint32_t layers, uint32_t max_ngram, uint32_t heads,
                                 int64_t* out) {
  if (vocab_size < 1 || layers == 0 || heads == 0 || out == nullptr) return -1;
  if (max_ngram < 2 || max_ngram > ENGRAM_HASH_MAX_NGRAM) return -1;
  if (layers > ENGRAM_HASH_MAX_COLUMNS || heads > ENGRAM_HASH_MAX_COLUMNS) return -1;
  const uint64_t places = uint64_t{layers} * (max_ngram - 1) * heads;
  if (places > ENGRAM_HASH_MAX_COLUMNS) return -1;
  constexpr uint64_t kLast = std::numeric_limits<int64_t>::max();
  auto candidate = static_cast<uint64_t>(vocab_size);
  for (uint64_t place = 0; place < places; ++candidate) {
    if (candidate > kLast) return -1;
    if (is_prime(candidate)) out[place++] = static_cast<int64_t>(candidate);
  }
  return 0;
}

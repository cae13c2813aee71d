// splitmix64: well-mixed 64-bit words from a counter, the same on every machine (Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", 2014). Synthetic rows are made of it (docs/table_format.md), so it never
// changes.
#pragma once
#include <cstdint>

namespace engram {

constexpr std::uint64_t kSplitmixGamma = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio, odd

// The output function: a bijection of 64-bit words.
constexpr std::uint64_t splitmix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// The generator.
class Splitmix64 {
 public:
  explicit Splitmix64(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() { return splitmix64(state_ += kSplitmixGamma); }
  // In 0 .. limit - 1, with the bias of a remainder.
  std::uint64_t below(std::uint64_t limit) { return next() % limit; }
  // In [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  std::uint64_t state_;
};

}  // namespace engram

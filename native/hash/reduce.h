// Reduces rolling hashes to row ids: floored remainder by a head size, plus the head's offset, eight columns at a time.
// 64-bit division is replaced by multiplication with a reciprocal; reduce.cpp proves each way exact.
// Pure functions, no allocation, safe from any number of threads.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace engram::hash {

inline constexpr size_t kBlockColumns = 8;

// The constants of up to eight neighbouring columns. Unused places repeat size 1, offset 0.
struct ColumnBlock {
  alignas(64) std::array<double, kBlockColumns> inverse;       // 1 / size, rounded to nearest
  alignas(64) std::array<uint64_t, kBlockColumns> reciprocal;  // floor((2^64 - 1) / size)
  alignas(32) std::array<uint32_t, kBlockColumns> size;
  alignas(32) std::array<uint32_t, kBlockColumns> offset;
  size_t columns;  // 1 .. 8

  // Sizes in 1 .. 2^31 - 1, offset + size - 1 <= 2^31 - 1, 1 <= columns <= 8.
  ColumnBlock(const int64_t* sizes, const int64_t* offsets, size_t columns);
};

// out[t * stride + c] = floormod(rolling[t], size[c]) + offset[c] for t < count, c < columns.
using ReduceFunction = void (*)(const int64_t* rolling, size_t count, const ColumnBlock& block, int32_t* out,
                                size_t stride);

struct Reducer {
  const char* name;
  ReduceFunction run;
  int64_t smallest_size;  // exact only for head sizes from here up
};

// The reducers that this CPU can run, slowest first. The first one is exact for every size.
struct Reducers {
  std::array<Reducer, 2> list;
  size_t count;
};
Reducers usable_reducers();

// The fastest reducer that is exact for sizes of `smallest_size` and above, in this thread's rounding mode.
ReduceFunction choose_reducer(int64_t smallest_size);

}  // namespace engram::hash

// Copying rows to their place in a reply. Row sizes are properties of a table; the common one (264 bytes) and its parts
// get loops with constant bounds, in the widest vectors that the machine has.
#pragma once

#include <cstdint>
#include <cstring>

namespace engram {

// Where a batch's rows go. Packed: row i at values + i * value_bytes, scale_bytes 0. Split: value and scale parts
// apart. Null values: nowhere (a prefetch).
struct Destination {
  std::uint8_t* values = nullptr;
  std::uint8_t* scales = nullptr;
  std::uint32_t value_bytes = 0;
  std::uint32_t scale_bytes = 0;

  void put(std::uint64_t position, const std::uint8_t* row) const {
    std::memcpy(values + position * value_bytes, row, value_bytes);
    if (scale_bytes != 0) std::memcpy(scales + position * scale_bytes, row + value_bytes, scale_bytes);
  }
  void put_zeros(std::uint64_t position) const {
    std::memset(values + position * value_bytes, 0, value_bytes);
    if (scale_bytes != 0) std::memset(scales + position * scale_bytes, 0, scale_bytes);
  }
};

// Copies rows first .. first + count - 1 of the destination from sources[0 .. count - 1], prefetching row bytes ahead.
// A null source is skipped.
using RowCopier = void (*)(const std::uint8_t* const* sources, std::uint32_t count, const Destination& destination,
                           std::uint64_t first);

// The same from slots of a row cache: candidate i is slot number + 1 or 0, a slot (stride bytes) is the row's key and
// the row. missed[i] = 1 where there is no candidate or it has another key; such a row is not copied.
struct SlotSources {
  const std::uint8_t* slots = nullptr;
  std::uint32_t stride = 0;
  const std::uint32_t* candidates = nullptr;
  const std::uint64_t* keys = nullptr;
  std::uint8_t* missed = nullptr;
};
using SlotCopier = void (*)(const SlotSources& sources, std::uint32_t count, const Destination& destination,
                            std::uint64_t first);

// The same from rows whose values and scales lie apart, by row number; -1 gives zero bytes, kNoRow is skipped. The
// destination has either layout.
struct PartSources {
  const std::uint8_t* values = nullptr;
  const std::uint8_t* scales = nullptr;
  std::uint32_t value_bytes = 0;
  std::uint32_t scale_bytes = 0;
};
constexpr std::int64_t kNoRow = -2;
using PartCopier = void (*)(const PartSources& sources, const std::int64_t* rows, std::uint32_t count,
                            const Destination& destination, std::uint64_t first);

// The best copiers for this machine and a destination's layout.
struct Copiers {
  RowCopier rows = nullptr;
  SlotCopier slots = nullptr;
};
Copiers choose_copiers(std::uint32_t value_bytes, std::uint32_t scale_bytes);
// The best one for this machine and rows of these parts.
PartCopier choose_part_copier(std::uint32_t value_bytes, std::uint32_t scale_bytes);

}  // namespace engram

// Finds the sampled rows among a batch's ids: a few tenths of a nanosecond an id.
#pragma once

#include <cstdint>

namespace engram {

// Appends to `positions` those i in 0 .. count - 1 whose ids[i] >= 0 hashes to at most `limit`; returns their number.
// count <= 65,536 and positions has room for all.
std::uint32_t filter_sample(const std::int64_t* ids, std::uint32_t count, std::uint32_t salt, std::uint32_t limit,
                            std::uint16_t* positions);

}  // namespace engram

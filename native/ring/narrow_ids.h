// Row ids on their way into the ring: as four bytes each where they fit, since what limits a large submission is the
// number of cache lines that go from the client's CPU to the worker's.
#pragma once

#include <cstdint>

namespace engram {

// Writes ids[0 .. count - 1] to `narrow`. False, with `narrow` undefined, where one of them does not fit.
bool narrow_ids(const int64_t* ids, uint64_t count, int32_t* narrow);

}  // namespace engram

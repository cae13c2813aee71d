// Fetch and prefetch of any number of rows: split into parts, several in flight, each reply copied out while the daemon
// works on the next.
#pragma once
#include <cstdint>

#include "engram/client.h"

namespace engram {

class Session;

int run_fetch(Session& session, engram_fetch& fetch, int32_t timeout_ms, engram_error* error);
void cancel_fetch(Session& session, engram_fetch& fetch);
int64_t find_bad_id(const void* ids, uint32_t id_bytes, uint64_t count, uint64_t rows);

}  // namespace engram

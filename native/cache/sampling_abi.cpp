// The C ABI of planning: sampling and Belady's limit. No exception leaves it.
#include <algorithm>
#include <new>

#include "cache/belady.h"
#include "cache/row_cache.h"
#include "cache/row_key.h"
#include "cache/row_sample.h"
#include "engram/sampling.h"

static_assert(engram::kSampleAll == ENGRAM_SAMPLE_ALL && engram::kKeyRowBits == ENGRAM_KEY_ROW_BITS);

extern "C" {

uint64_t engram_cache_rows(uint64_t budget_bytes, uint32_t row_bytes) {
  engram::RowCache::Options options;
  options.budget_bytes = budget_bytes;
  options.row_bytes = row_bytes;
  return engram::RowCache::plan_capacity(options);
}

uint64_t engram_sample_rows(const int32_t* ids, uint64_t count, uint32_t columns, uint32_t columns_per_layer,
                            uint32_t first_layer_key, uint64_t threshold, uint64_t* keys, uint8_t* key_columns,
                            uint64_t capacity) {
  uint64_t found = 0;
  for (uint64_t row = 0; row < count; row += columns) {
    const auto width = static_cast<uint32_t>(std::min<uint64_t>(columns, count - row));
    for (uint32_t column = 0; column < width; ++column) {
      const uint32_t layer_key = first_layer_key + column / columns_per_layer;
      const int32_t id = ids[row + column];
      if (engram::sample_hash(engram::sample_salt(layer_key), static_cast<uint32_t>(id)) >= threshold || id < 0)
        continue;
      if (found < capacity) {
        keys[found] = engram::row_key(layer_key, static_cast<uint32_t>(id));
        key_columns[found] = static_cast<uint8_t>(column);
      }
      ++found;
    }
  }
  return found;
}

uint64_t engram_thin_samples(uint64_t* keys, uint64_t count, uint64_t threshold) {
  uint64_t* const end =
      std::remove_if(keys, keys + count, [&](uint64_t key) { return engram::sample_hash_of_key(key) >= threshold; });
  return static_cast<uint64_t>(end - keys);
}

void engram_count_rows(const int32_t* ids, uint64_t tokens, uint32_t columns, uint32_t first_column, uint32_t width,
                       uint16_t document, uint8_t* counts, uint16_t* last) {
  constexpr uint64_t kAhead = 2;  // tokens; each row costs two cache misses otherwise
  for (uint64_t token = 0; token < tokens; ++token) {
    const int32_t* rows = ids + token * columns + first_column;
    if (token + kAhead < tokens) {
      for (uint32_t column = 0; column < width; ++column) {
        const int32_t row = rows[kAhead * columns + column];
        __builtin_prefetch(counts + row, 1);
        __builtin_prefetch(last + row, 1);
      }
    }
    for (uint32_t column = 0; column < width; ++column) {
      const int32_t row = rows[column];
      if (last[row] == document) continue;
      last[row] = document;
      if (counts[row] < 255) ++counts[row];
    }
  }
}

int engram_next_uses(const uint64_t* keys, uint64_t count, uint32_t* next) {
  if (count >= engram::kNever) return -1;
  try {
    engram::find_next_uses(keys, count, next);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

int64_t engram_belady_run(const uint32_t* next, uint64_t count, uint64_t rows, uint8_t* missed) {
  try {
    return static_cast<int64_t>(engram::run_belady(next, count, rows, missed));
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"

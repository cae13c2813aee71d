// Row ids, from where the client wrote them into the worker's own memory: read once, checked there.
#include <algorithm>
#include <cstring>

#include "engine/worker.h"

namespace engram {
namespace {

// Copies ids out of memory that somebody else may be writing: each is read once into private memory, and only that is
// looked at. Returns the position of the first id outside -1 .. rows - 1, or count.
template <typename Id>
std::uint32_t copy_ids(const std::uint8_t* source, std::uint32_t count, std::uint64_t rows, std::int64_t* ids,
                       std::uint64_t* zeros) {
  Id block[RowCache::kBlockRows];
  std::memcpy(block, source, count * sizeof(Id));
  asm volatile("" : : "r"(block) : "memory");  // the compiler must not read the source again
  std::uint64_t bad = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::int64_t id = block[i];
    ids[i] = id;
    bad |= static_cast<std::uint64_t>(id) + 1 > rows ? 1 : 0;
    *zeros += id == -1 ? 1 : 0;
  }
  if (bad == 0) return count;
  const auto* first =
      std::find_if(ids, ids + count, [&](std::int64_t id) { return static_cast<std::uint64_t>(id) + 1 > rows; });
  return static_cast<std::uint32_t>(first - ids);
}

}  // namespace

// One block's ids; any worker. The position of its first bad id, or UINT32_MAX.
std::uint32_t Worker::take_ids(Batch& batch, std::uint32_t begin, std::uint32_t count, std::uint64_t* zeros) {
  const std::uint32_t id_bytes = batch.request.id_bytes;
  const std::uint8_t* source = batch.untaken_ids + std::uint64_t{begin} * id_bytes;
  std::int64_t* ids = batch.ids.data() + begin;
  const std::uint32_t good = id_bytes == 4 ? copy_ids<std::int32_t>(source, count, batch.layer->rows, ids, zeros)
                                           : copy_ids<std::int64_t>(source, count, batch.layer->rows, ids, zeros);
  // The client's CPU holds the next block's lines: they come while this block's rows are copied.
  const std::uint32_t next = std::min(RowCache::kBlockRows, batch.row_count() - begin - count);
  for (std::uint32_t offset = 0; offset < next * id_bytes; offset += 64) {
    __builtin_prefetch(source + std::uint64_t{count} * id_bytes + offset);
  }
  return good < count ? begin + good : UINT32_MAX;
}

// All ids, before anything is looked up. False where one is bad: the batch has failed.
bool Worker::take_all_ids(Batch& batch) {
  for (std::uint32_t begin = 0; begin < batch.row_count(); begin += RowCache::kBlockRows) {
    const std::uint32_t count = std::min(RowCache::kBlockRows, batch.row_count() - begin);
    const std::uint32_t bad = take_ids(batch, begin, count, &batch.rows_zero);
    if (bad != UINT32_MAX) {
      fail_bad_id(batch, bad);
      return false;
    }
  }
  batch.untaken_ids = nullptr;
  return true;
}

// Ends the look-up of a batch with an id outside its table; rows copied before mean nothing.
void Worker::fail_bad_id(Batch& batch, std::uint32_t position) {
  batch.fail(ENGRAM_STATUS_ROW_ID, position, batch.ids[position], 0, 0);
  batch.ids.clear();
  batch.looked_up = true;
}

}  // namespace engram

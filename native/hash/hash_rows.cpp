// Row ids of a run of tokens. Works through blocks of tokens that stay in the L1 cache: map the tokens, look back,
// then per layer and shift extend the rolling hashes and reduce them to the columns of that n-gram order.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "engram/hash.h"
#include "reduce.h"

namespace engram::hash {
namespace {

constexpr uint32_t kMaxNgram = ENGRAM_HASH_MAX_NGRAM;
constexpr size_t kMaxHistory = kMaxNgram - 1;
constexpr size_t kBlockTokens = 256;

struct Geometry {
  const engram_hash_layer* layers;
  uint32_t layer_count;
  uint32_t max_ngram;
  uint32_t heads;

  size_t columns() const { return size_t{max_ngram - 1} * heads; }
};

bool is_valid(const Geometry& geometry) {
  if (geometry.layers == nullptr || geometry.layer_count == 0 || geometry.heads == 0) return false;
  if (geometry.max_ngram < 2 || geometry.max_ngram > kMaxNgram) return false;
  constexpr uint32_t kMost = ENGRAM_HASH_MAX_COLUMNS;
  if (geometry.layer_count > kMost || geometry.heads > kMost) return false;
  if (geometry.layer_count * geometry.columns() > kMost) return false;
  constexpr int64_t kLastRow = std::numeric_limits<int32_t>::max();
  for (uint32_t layer = 0; layer < geometry.layer_count; ++layer) {
    const engram_hash_layer& constants = geometry.layers[layer];
    if (constants.head_sizes == nullptr || constants.head_offsets == nullptr) return false;
    for (size_t column = 0; column < geometry.columns(); ++column) {
      const int64_t size = constants.head_sizes[column];
      const int64_t offset = constants.head_offsets[column];
      if (size < 1 || size > kLastRow || offset < 0 || offset > kLastRow - (size - 1)) return false;
    }
  }
  return true;
}

// The compressed ids of one block and of the kMaxHistory positions before it, and, for each position, how many
// positions up to and including it are live and known: position p sees shift s exactly where live_run[p] > s.
class Window {
 public:
  Window(const int32_t* token_map, uint32_t token_map_size) : token_map_(token_map), token_map_size_(token_map_size) {}

  // Drops all but the last kMaxHistory positions; those become the look-back of the next block.
  void advance() {
    if (count_ == 0) return;
    std::copy_n(ids_.begin() + static_cast<ptrdiff_t>(count_), kMaxHistory, ids_.begin());
    std::copy_n(live_run_.begin() + static_cast<ptrdiff_t>(count_), kMaxHistory, live_run_.begin());
    count_ = 0;
  }

  // Appends `count` <= kBlockTokens - (appended so far) positions. Returns the index of the first bad token, or count.
  size_t append(const int64_t* tokens, const uint8_t* dead, size_t count) {
    uint32_t run = live_run_[kMaxHistory + count_ - 1];
    for (size_t i = 0; i < count; ++i) {
      const int64_t token = tokens[i];
      if (token < 0 || token >= int64_t{token_map_size_}) return i;
      run = dead != nullptr && dead[i] != 0 ? 0 : std::min(run + 1, kMaxNgram);
      ids_[kMaxHistory + count_] = token_map_[token];
      live_run_[kMaxHistory + count_] = run;
      ++count_;
    }
    return count;
  }

  size_t size() const { return count_; }

  // out[t] = the compressed id that position t sees at `shift`, or pad_id.
  void look_back(uint32_t shift, int32_t pad_id, int64_t* out) const {
    const int32_t* ids = ids_.data() + kMaxHistory - shift;
    const uint32_t* live_run = live_run_.data() + kMaxHistory;
    for (size_t t = 0; t < count_; ++t) out[t] = live_run[t] > shift ? ids[t] : pad_id;
  }

 private:
  const int32_t* token_map_;
  uint32_t token_map_size_;
  size_t count_ = 0;
  std::array<int32_t, kMaxHistory + kBlockTokens> ids_{};
  std::array<uint32_t, kMaxHistory + kBlockTokens> live_run_{};
};

// One n-gram order of one layer: `heads` neighbouring columns.
void reduce_order(const int64_t* rolling, size_t count, const int64_t* sizes, const int64_t* offsets, size_t heads,
                  int32_t* out, size_t stride) {
  const ReduceFunction reduce = choose_reducer(*std::min_element(sizes, sizes + heads));
  for (size_t head = 0; head < heads; head += kBlockColumns) {
    const ColumnBlock block(sizes + head, offsets + head, std::min(kBlockColumns, heads - head));
    reduce(rolling, count, block, out + head, stride);
  }
}

// out: int32 [window.size()][layers][columns].
void hash_block(const Geometry& geometry, const Window& window, int32_t pad_id, int32_t* out) {
  std::array<std::array<int64_t, kBlockTokens>, kMaxNgram> seen;
  for (uint32_t shift = 0; shift < geometry.max_ngram; ++shift) window.look_back(shift, pad_id, seen[shift].data());
  const size_t stride = geometry.layer_count * geometry.columns();
  std::array<int64_t, kBlockTokens> rolling;
  for (uint32_t layer = 0; layer < geometry.layer_count; ++layer) {
    const engram_hash_layer& constants = geometry.layers[layer];
    for (uint32_t shift = 0; shift < geometry.max_ngram; ++shift) {
      const auto multiplier = static_cast<uint64_t>(constants.multipliers[shift]);
      for (size_t t = 0; t < window.size(); ++t) {
        const uint64_t product = static_cast<uint64_t>(seen[shift][t]) * multiplier;
        rolling[t] = static_cast<int64_t>(shift == 0 ? product : static_cast<uint64_t>(rolling[t]) ^ product);
      }
      if (shift == 0) continue;
      const size_t column = size_t{shift - 1} * geometry.heads;
      reduce_order(rolling.data(), window.size(), constants.head_sizes + column, constants.head_offsets + column,
                   geometry.heads, out + layer * geometry.columns() + column, stride);
    }
  }
}

}  // namespace
}  // namespace engram::hash

extern "C" int64_t engram_hash_rows(const engram_hash_layer* layers, uint32_t layer_count, uint32_t max_ngram,
                                    uint32_t heads, const int32_t* token_map, uint32_t token_map_size, int32_t pad_id,
                                    const int64_t* tokens, const uint8_t* dead, uint64_t count, const int64_t* history,
                                    const uint8_t* history_dead, uint32_t history_count, int32_t* out) {
  using namespace engram::hash;
  constexpr int64_t kInvalid = std::numeric_limits<int64_t>::min();
  const Geometry geometry{layers, layer_count, max_ngram, heads};
  if (!is_valid(geometry) || token_map == nullptr || history_count > max_ngram - 1) return kInvalid;
  if (history == nullptr && history_count != 0) return kInvalid;
  if ((tokens == nullptr || out == nullptr) && count != 0) return kInvalid;
  const size_t stride = layer_count * geometry.columns();
  if (count > std::numeric_limits<uint64_t>::max() / sizeof(int32_t) / stride / 2) return kInvalid;

  Window window(token_map, token_map_size);
  const size_t bad_history = window.append(history, history_dead, history_count);
  if (bad_history < history_count) return -2 - static_cast<int64_t>(bad_history);
  for (uint64_t done = 0; done < count; done += kBlockTokens) {
    window.advance();
    const size_t wanted = std::min<uint64_t>(kBlockTokens, count - done);
    const size_t taken = window.append(tokens + done, dead == nullptr ? nullptr : dead + done, wanted);
    if (taken < wanted) return static_cast<int64_t>(done + taken);
    hash_block(geometry, window, pad_id, out + done * stride);
  }
  return -1;
}

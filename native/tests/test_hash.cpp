// Row ids and head sizes against plain division, trial division and a position-by-position reading of the formula.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cfenv>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "../hash/reduce.h"
#include "engram/hash.h"

namespace {

using engram::hash::ColumnBlock;
using engram::hash::kBlockColumns;

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
constexpr int64_t kSmallest = std::numeric_limits<int64_t>::min();
constexpr int64_t kLastRow = std::numeric_limits<int32_t>::max();
constexpr int64_t kPublishedVocab = 16000000;
constexpr uint32_t kHeads = 8;

int64_t floor_modulo(int64_t x, int64_t d) {
  const int64_t r = x % d;
  return r < 0 ? r + d : r;
}

bool is_prime_by_trial(int64_t n) {
  if (n < 2) return false;
  for (int64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return true;
}

// Rolling values around multiples of d all over the int64 range, its ends, and random ones.
std::vector<int64_t> rolling_values(int64_t d, std::mt19937_64& random) {
  std::vector<int64_t> values = {0, 1, -1, d, -d, kLargest, kLargest - 1, kSmallest, kSmallest + 1};
  const int64_t most = kLargest / d - 1;
  for (int i = 0; i < 64; ++i) {
    const int64_t quotient =
        i < 8 ? most - i : static_cast<int64_t>(random() % static_cast<uint64_t>(most)) >> (i % 40);
    for (const int64_t near : {-1, 0, 1}) {
      values.push_back(quotient * d + near);
      values.push_back(-(quotient * d) + near);
    }
    values.push_back(static_cast<int64_t>(random()));
    values.push_back(static_cast<int64_t>(random() >> (i % 64)));
  }
  return values;
}

struct Layer {
  std::vector<int64_t> multipliers, sizes, offsets;
};

struct Model {
  uint32_t max_ngram, heads;
  std::vector<Layer> layers;
  std::vector<int32_t> token_map;
  int32_t pad_id;

  size_t columns() const { return size_t{max_ngram - 1} * heads; }

  std::vector<engram_hash_layer> constants() const {
    std::vector<engram_hash_layer> all;
    for (const Layer& layer : layers) {
      engram_hash_layer one{};
      std::copy(layer.multipliers.begin(), layer.multipliers.end(), one.multipliers);
      one.head_sizes = layer.sizes.data();
      one.head_offsets = layer.offsets.data();
      all.push_back(one);
    }
    return all;
  }
};

Model random_model(uint32_t max_ngram, uint32_t heads, size_t layer_count, int64_t size_limit,
                   std::mt19937_64& random) {
  Model model{max_ngram, heads, {}, {}, static_cast<int32_t>(random() % 100)};
  size_limit = std::min<int64_t>(size_limit, kLastRow / static_cast<int64_t>(model.columns()));
  for (size_t l = 0; l < layer_count; ++l) {
    Layer layer;
    for (uint32_t s = 0; s < max_ngram; ++s) layer.multipliers.push_back(static_cast<int64_t>(random() | 1));
    int64_t offset = 0;
    for (size_t c = 0; c < model.columns(); ++c) {
      layer.sizes.push_back(size_limit - static_cast<int64_t>(random() % static_cast<uint64_t>(size_limit / 4 + 1)));
      layer.offsets.push_back(offset);
      offset += layer.sizes.back();
    }
    model.layers.push_back(layer);
  }
  for (int i = 0; i < 1000; ++i) model.token_map.push_back(static_cast<int32_t>(random() >> 33));
  return model;
}

struct Sequence {
  std::vector<int64_t> tokens;
  std::vector<uint8_t> dead;
};

Sequence random_sequence(const Model& model, size_t count, std::mt19937_64& random) {
  Sequence sequence;
  for (size_t i = 0; i < count; ++i) {
    sequence.tokens.push_back(static_cast<int64_t>(random() % model.token_map.size()));
    sequence.dead.push_back(random() % 5 == 0);
  }
  return sequence;
}

// The formula, position by position, over the whole sequence.
std::vector<int32_t> expected_rows(const Model& model, const Sequence& sequence) {
  std::vector<int32_t> rows;
  for (int64_t p = 0; p < static_cast<int64_t>(sequence.tokens.size()); ++p) {
    for (const Layer& layer : model.layers) {
      uint64_t rolling = 0;
      bool blocked = false;
      for (uint32_t s = 0; s < model.max_ngram; ++s) {
        const int64_t source = p - s;
        blocked = blocked || source < 0 || sequence.dead[static_cast<size_t>(source)] != 0;
        const int64_t value =
            blocked ? model.pad_id : model.token_map[static_cast<size_t>(sequence.tokens[static_cast<size_t>(source)])];
        rolling ^= static_cast<uint64_t>(value) * static_cast<uint64_t>(layer.multipliers[s]);
        for (uint32_t h = 0; s > 0 && h < model.heads; ++h) {
          const size_t column = (s - 1) * model.heads + h;
          rows.push_back(static_cast<int32_t>(floor_modulo(static_cast<int64_t>(rolling), layer.sizes[column]) +
                                              layer.offsets[column]));
        }
      }
    }
  }
  return rows;
}

int64_t hash_part(const Model& model, const Sequence& sequence, size_t begin, size_t end, size_t history,
                  std::vector<int32_t>& out) {
  const auto constants = model.constants();
  out.assign((end - begin) * model.layers.size() * model.columns(), -7);
  return engram_hash_rows(constants.data(), static_cast<uint32_t>(constants.size()), model.max_ngram, model.heads,
                          model.token_map.data(), static_cast<uint32_t>(model.token_map.size()), model.pad_id,
                          sequence.tokens.data() + begin, sequence.dead.data() + begin, end - begin,
                          sequence.tokens.data() + begin - history, sequence.dead.data() + begin - history,
                          static_cast<uint32_t>(history), out.data());
}

}  // namespace

TEST_CASE("every reducer equals plain division on boundary and random values") {
  std::mt19937_64 random(1);
  const auto usable = engram::hash::usable_reducers();
  REQUIRE(usable.count >= 1);
  CHECK(usable.list[0].smallest_size == 1);
  std::vector<int64_t> sizes = {1, 2, 3, 5, 8191, 8192, 8193, 8209, 16000057, (1 << 24) - 3, kLastRow - 1, kLastRow};
  for (int i = 0; i < 400; ++i) sizes.push_back(static_cast<int64_t>(random() % (uint64_t{1} << (1 + i % 31))) + 1);
  for (size_t r = 0; r < usable.count; ++r) {
    const auto& reducer = usable.list[r];
    CAPTURE(reducer.name);
    for (int64_t size : sizes) {
      size = std::min(size, kLastRow);
      if (size < reducer.smallest_size) continue;
      const auto values = rolling_values(size, random);
      for (const size_t columns : {size_t{8}, size_t{1} + random() % 8}) {
        // Neighbouring sizes in the other columns, so that a mixed-up column shows.
        std::vector<int64_t> block_sizes, offsets;
        for (size_t c = 0; c < columns; ++c) {
          block_sizes.push_back(size + static_cast<int64_t>(c) <= kLastRow ? size + static_cast<int64_t>(c) : size);
          offsets.push_back(kLastRow - block_sizes.back() + 1);
        }
        const ColumnBlock block(block_sizes.data(), offsets.data(), columns);
        const size_t stride = columns + 3;
        std::vector<int32_t> out(values.size() * stride, -7);
        reducer.run(values.data(), values.size(), block, out.data(), stride);
        size_t wrong = 0;
        for (size_t t = 0; t < values.size(); ++t) {
          for (size_t c = 0; c < stride; ++c) {
            const int64_t want = c < columns ? floor_modulo(values[t], block_sizes[c]) + offsets[c] : -7;
            wrong += out[t * stride + c] != want;
          }
        }
        CAPTURE(size);
        CAPTURE(columns);
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("the published head sizes") {
  std::vector<int64_t> sizes(48);
  REQUIRE(engram_head_sizes(kPublishedVocab, 2, 4, kHeads, sizes.data()) == 0);
  int64_t sums[2] = {0, 0};
  for (size_t i = 0; i < sizes.size(); ++i) sums[i / 24] += sizes[i];
  CHECK(sums[0] == 384006168);
  CHECK(sums[1] == 384016682);
}

TEST_CASE("head sizes equal a search that restarts at every place") {
  for (const int64_t vocab : {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{90}, int64_t{10007}, int64_t{1 << 20}}) {
    std::set<int64_t> used;
    std::vector<int64_t> want;
    for (int place = 0; place < 3 * 4; ++place) {
      int64_t candidate = vocab - 1;
      for (int head = 0; head < 5; ++head) {
        do ++candidate;
        while (!is_prime_by_trial(candidate) || used.count(candidate) != 0);
        used.insert(candidate);
        want.push_back(candidate);
      }
    }
    std::vector<int64_t> sizes(want.size());
    REQUIRE(engram_head_sizes(vocab, 3, 5, 5, sizes.data()) == 0);
    CHECK(sizes == want);
  }
}

TEST_CASE("head sizes over the whole int64 range") {
  int64_t prime = 0;
  // Around 2^61 - 1 (a Mersenne prime), and the largest prime below 2^63.
  CHECK(engram_head_sizes((int64_t{1} << 61) - 1, 1, 2, 1, &prime) == 0);
  CHECK(prime == (int64_t{1} << 61) - 1);
  CHECK(engram_head_sizes(kLargest - 24, 1, 2, 1, &prime) == 0);
  CHECK(prime == kLargest - 24);
  CHECK(engram_head_sizes(kLargest - 23, 1, 2, 1, &prime) == -1);
  // 3215031751 is a strong pseudoprime to bases 2, 3, 5 and 7; 3825123056546413051 to 2 .. 23.
  CHECK(engram_head_sizes(3215031751, 1, 2, 1, &prime) == 0);
  CHECK(prime > 3215031751);
  CHECK(is_prime_by_trial(prime));
  CHECK(engram_head_sizes(3825123056546413051, 1, 2, 1, &prime) == 0);
  CHECK(prime > 3825123056546413051);
}

TEST_CASE("head sizes refuse what is out of range") {
  int64_t out[64];
  CHECK(engram_head_sizes(0, 1, 2, 1, out) == -1);
  CHECK(engram_head_sizes(-5, 1, 2, 1, out) == -1);
  CHECK(engram_head_sizes(10, 0, 2, 1, out) == -1);
  CHECK(engram_head_sizes(10, 1, 1, 1, out) == -1);
  CHECK(engram_head_sizes(10, 1, 9, 1, out) == -1);
  CHECK(engram_head_sizes(10, 1, 2, 0, out) == -1);
  CHECK(engram_head_sizes(10, 1, 2, 65537, out) == -1);
  CHECK(engram_head_sizes(10, 0xffffffffu, 8, 0xffffffffu, out) == -1);
  CHECK(engram_head_sizes(10, 1, 2, 1, nullptr) == -1);
}

TEST_CASE("rows equal the formula for any geometry, and in chunks of any cut") {
  std::mt19937_64 random(2);
  for (const uint32_t max_ngram : {2u, 3u, 4u, 8u}) {
    for (const uint32_t heads : {1u, 7u, 8u, 19u}) {
      for (const int64_t size_limit : {int64_t{10}, int64_t{8300}, kPublishedVocab, kLastRow}) {
        const Model model = random_model(max_ngram, heads, 1 + random() % 3, size_limit, random);
        const Sequence sequence = random_sequence(model, 700, random);
        const auto want = expected_rows(model, sequence);
        std::vector<int32_t> got;
        REQUIRE(hash_part(model, sequence, 0, sequence.tokens.size(), 0, got) == -1);
        CHECK(got == want);
        std::vector<int32_t> joined;
        for (size_t begin = 0; begin < sequence.tokens.size();) {
          const size_t longest = random() % 3 == 0 ? 300 : 5;
          const size_t end = std::min(sequence.tokens.size(), begin + random() % longest);
          const size_t history = std::min<size_t>(begin, max_ngram - 1);
          REQUIRE(hash_part(model, sequence, begin, end, history, got) == -1);
          joined.insert(joined.end(), got.begin(), got.end());
          begin = end;
        }
        CHECK(joined == want);
      }
    }
  }
}

TEST_CASE("rows are exact in every rounding mode") {
  std::mt19937_64 random(3);
  const Model model = random_model(4, kHeads, 2, kPublishedVocab, random);
  const Sequence sequence = random_sequence(model, 4000, random);
  const auto want = expected_rows(model, sequence);
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST}) {
    std::vector<int32_t> got;
    std::fesetround(mode);
    const int64_t result = hash_part(model, sequence, 0, sequence.tokens.size(), 0, got);
    std::fesetround(FE_TONEAREST);
    CHECK(result == -1);
    CHECK(got == want);
  }
}

TEST_CASE("the first bad token is named") {
  std::mt19937_64 random(4);
  const Model model = random_model(4, kHeads, 1, 1000, random);
  std::vector<int32_t> got;
  for (const size_t position : {0u, 5u, 255u, 256u, 599u}) {
    for (const int64_t bad : {int64_t{-1}, static_cast<int64_t>(model.token_map.size()), kLargest, kSmallest}) {
      Sequence sequence = random_sequence(model, 600, random);
      sequence.tokens[position] = bad;
      sequence.tokens[599] = bad;
      CHECK(hash_part(model, sequence, 0, 600, 0, got) == static_cast<int64_t>(position));
      sequence.dead[position] = 1;
      CHECK(hash_part(model, sequence, 0, 600, 0, got) == static_cast<int64_t>(position));
    }
  }
  for (size_t position = 0; position < 3; ++position) {
    Sequence sequence = random_sequence(model, 600, random);
    sequence.tokens[position] = -1;
    sequence.tokens[10] = -1;
    CHECK(hash_part(model, sequence, 3, 600, 3, got) == -2 - static_cast<int64_t>(position));
  }
}

TEST_CASE("arguments out of range are refused and nothing is written") {
  std::mt19937_64 random(5);
  const Model model = random_model(3, 2, 1, 1000, random);
  const auto good = model.constants();
  const int64_t tokens[2] = {1, 2};
  std::vector<int32_t> out(2 * model.columns(), -7);
  struct Call {
    const engram_hash_layer* layers;
    uint32_t layer_count = 1, max_ngram = 3, heads = 2;
    const int32_t* map;
    const int64_t* tokens;
    uint64_t count = 2;
    const int64_t* history = nullptr;
    uint32_t history_count = 0;
    int32_t* out;
  };
  const Call valid{.layers = good.data(), .map = model.token_map.data(), .tokens = tokens, .out = out.data()};
  const auto run = [&](const Call& c) {
    return engram_hash_rows(c.layers, c.layer_count, c.max_ngram, c.heads, c.map, 1000, 0, c.tokens, nullptr, c.count,
                            c.history, nullptr, c.history_count, c.out);
  };
  const auto refused = [&](auto change) {
    Call call = valid;
    change(call);
    return run(call) == kSmallest;
  };
  CHECK(refused([](Call& c) { c.layers = nullptr; }));
  CHECK(refused([](Call& c) { c.layer_count = 0; }));
  CHECK(refused([](Call& c) { c.layer_count = 0xffffffffu; }));
  CHECK(refused([](Call& c) { c.max_ngram = 1; }));
  CHECK(refused([](Call& c) { c.max_ngram = 9; }));
  CHECK(refused([](Call& c) { c.heads = 0; }));
  CHECK(refused([](Call& c) { c.heads = 0x80000001u; }));
  CHECK(refused([](Call& c) { c.map = nullptr; }));
  CHECK(refused([](Call& c) { c.tokens = nullptr; }));
  CHECK(refused([](Call& c) { c.out = nullptr; }));
  CHECK(refused([](Call& c) { c.history_count = 1; }));
  CHECK(refused([&](Call& c) { c.history = tokens, c.history_count = 3; }));
  CHECK(refused([](Call& c) { c.count = std::numeric_limits<uint64_t>::max() / 8; }));
  for (const int64_t size : {int64_t{0}, int64_t{-3}, kLastRow + 1, kLargest}) {
    Model bad = model;
    bad.layers[0].sizes[3] = size;
    const auto constants = bad.constants();
    CHECK(refused([&](Call& c) { c.layers = constants.data(); }));
  }
  for (const int64_t offset : {int64_t{-1}, kLastRow, kLargest}) {
    Model bad = model;
    bad.layers[0].offsets[3] = offset;
    const auto constants = bad.constants();
    CHECK(refused([&](Call& c) { c.layers = constants.data(); }));
  }
  CHECK(std::all_of(out.begin(), out.end(), [](int32_t row) { return row == -7; }));
  CHECK(run(valid) == -1);
  Call empty = valid;
  empty.count = 0, empty.tokens = nullptr, empty.out = nullptr;
  CHECK(run(empty) == -1);
}

// The row cache's index: from a row's key to a slot number. Buckets of one cache line hold eight entries: a 16-bit tag,
// a slot number and a small hit count each. A key lives in its first bucket, or, where that was full, in its second
// one; the first then carries an overflow count, so that a look-up reads the second line only if it can matter.
//
// One writer at a time (the cache's lock); readers need no lock but an epoch. A tag match is a candidate: the slot's
// own key decides. The hit count may be raised by a reader just as the entry is given to another key: that key then
// starts with a hit too many, which harms nobody.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/huge_memory.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace engram {

class RowIndex {
 public:
  static constexpr std::uint32_t kNone = 0;  // slot numbers are stored + 1: fresh zero pages are an empty index
  static constexpr std::uint8_t kMaxHits = 3;
  static constexpr std::size_t kEntries = 8;

  struct alignas(64) Bucket {
    std::atomic<std::uint64_t> tags[2];  // eight 16-bit tags
    std::atomic<std::uint32_t> slots[kEntries];
    std::atomic<std::uint8_t> hits[kEntries];
    std::atomic<std::uint32_t> overflow;  // keys whose first bucket this is, living in their second
    std::uint32_t reserved;
  };
  static_assert(sizeof(Bucket) == 64);

  // A place in the index.
  struct Entry {
    Bucket* bucket = nullptr;
    std::uint32_t position = 0;
  };

  explicit RowIndex(std::uint64_t buckets) : buckets_(buckets), memory_(buckets * sizeof(Bucket)) {}

  bool valid() const { return memory_.valid(); }
  std::size_t bytes() const { return memory_.bytes(); }

  // A well-mixed hash of a key: the finaliser of MurmurHash3.
  static std::uint64_t hash(std::uint64_t key) {
    key ^= key >> 33;
    key *= 0xFF51AFD7ED558CCDull;
    key ^= key >> 33;
    key *= 0xC4CEB9FE1A85EC53ull;
    key ^= key >> 33;
    return key;
  }

  Bucket* first(std::uint64_t hash) const { return bucket(hash >> 32); }
  Bucket* second(std::uint64_t hash) const { return bucket((hash * 0x9E3779B97F4A7C15ull) >> 32); }

  // Calls visit(entry, slot) for each candidate of the hash until it returns true; true where one did.
  template <typename Visit>
  bool visit_candidates(std::uint64_t hash, Visit&& visit) const {
    Bucket* home = first(hash);
    if (visit_bucket(home, hash, visit)) return true;
    return home->overflow.load(std::memory_order_relaxed) != 0 && visit_bucket(second(hash), hash, visit);
  }

  // Writer: a free entry for the hash, or one with a null bucket where both buckets are full.
  Entry free_entry(std::uint64_t hash) const {
    for (Bucket* candidate : {first(hash), second(hash)}) {
      for (std::uint32_t i = 0; i < kEntries; ++i) {
        if (candidate->slots[i].load(std::memory_order_relaxed) == kNone) return {candidate, i};
      }
    }
    return {};
  }

  // Writer: publishes slot under the hash in a free entry.
  void publish(Entry entry, std::uint64_t hash, std::uint32_t slot) {
    set_tag(entry, tag(hash));
    entry.bucket->hits[entry.position].store(0, std::memory_order_relaxed);
    if (entry.bucket != first(hash)) first(hash)->overflow.fetch_add(1, std::memory_order_relaxed);
    entry.bucket->slots[entry.position].store(slot + 1, std::memory_order_seq_cst);
  }

  // Writer: removes the entry; no new reader finds its slot.
  void remove(Entry entry, std::uint64_t hash) {
    entry.bucket->slots[entry.position].store(kNone, std::memory_order_seq_cst);
    if (entry.bucket != first(hash)) first(hash)->overflow.fetch_sub(1, std::memory_order_relaxed);
  }

  // Writer: the same key moves to another slot.
  void move(Entry entry, std::uint32_t slot) {
    entry.bucket->hits[entry.position].store(0, std::memory_order_relaxed);
    entry.bucket->slots[entry.position].store(slot + 1, std::memory_order_seq_cst);
  }

  static void count_hit(Bucket* bucket, std::uint32_t position) {
    const std::uint8_t hits = bucket->hits[position].load(std::memory_order_relaxed);
    if (hits < kMaxHits) bucket->hits[position].store(hits + 1, std::memory_order_relaxed);
  }

  static std::uint16_t tag(std::uint64_t hash) { return static_cast<std::uint16_t>(hash); }

  // Bit i is set where entry i's tag equals the tag (without SSE2 perhaps also above a true match, never below the
  // first one: candidates are checked by key).
  static std::uint32_t match(const Bucket* bucket, std::uint16_t tag) {
    const std::uint64_t low = bucket->tags[0].load(std::memory_order_relaxed);
    const std::uint64_t high = bucket->tags[1].load(std::memory_order_relaxed);
#if defined(__SSE2__)
    const __m128i tags = _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
    const __m128i equal = _mm_cmpeq_epi16(tags, _mm_set1_epi16(static_cast<short>(tag)));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(equal, _mm_setzero_si128())));
#else
    const std::uint64_t repeated = tag * 0x0001000100010001ull;
    std::uint32_t matches = 0;
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::uint64_t difference = (half == 0 ? low : high) ^ repeated;
      std::uint64_t zeros = (difference - 0x0001000100010001ull) & ~difference & 0x8000800080008000ull;
      for (; zeros != 0; zeros &= zeros - 1) {
        matches |= 1u << (half * 4 + static_cast<std::uint32_t>(std::countr_zero(zeros)) / 16);
      }
    }
    return matches;
#endif
  }

 private:
  Bucket* bucket(std::uint64_t bits) const {
    const std::uint64_t index = ((bits & 0xFFFFFFFFull) * buckets_) >> 32;
    return reinterpret_cast<Bucket*>(memory_.data()) + index;
  }

  template <typename Visit>
  static bool visit_bucket(Bucket* bucket, std::uint64_t hash, Visit& visit) {
    for (std::uint32_t matches = match(bucket, tag(hash)); matches != 0; matches &= matches - 1) {
      const auto position = static_cast<std::uint32_t>(std::countr_zero(matches));
      const std::uint32_t slot = bucket->slots[position].load(std::memory_order_seq_cst);
      if (slot != kNone && visit(Entry{bucket, position}, slot - 1)) return true;
    }
    return false;
  }

  static void set_tag(Entry entry, std::uint16_t tag) {
    auto& word = entry.bucket->tags[entry.position / 4];
    const std::uint32_t shift = (entry.position % 4) * 16;
    const std::uint64_t cleared = word.load(std::memory_order_relaxed) & ~(std::uint64_t{0xFFFF} << shift);
    word.store(cleared | (std::uint64_t{tag} << shift), std::memory_order_relaxed);
  }

  std::uint64_t buckets_;
  HugeMemory memory_;
};

}  // namespace engram

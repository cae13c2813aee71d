// Textbook policies to hold the row cache's own against: LRU, S3-FIFO, fixed by past frequency, and Belady's optimum.
// Keys are dense numbers, so that each needs arrays only.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <new>
#include <queue>
#include <utility>
#include <vector>

#include "engram/bench.h"

namespace {

using Keys = std::vector<std::uint32_t>;
constexpr std::uint32_t kNever = 0xFFFFFFFF;

template <typename Policy>
void count_hits(Policy& policy, const std::uint32_t* keys, std::uint64_t count, std::uint64_t* hits) {
  hits[0] = hits[1] = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (!policy.access(keys[i], i)) continue;
    ++hits[0];
    hits[1] += i >= count / 2 ? 1 : 0;
  }
}

class Lru {
 public:
  Lru(std::uint32_t key_limit, std::uint64_t capacity)
      : capacity_(capacity), head_(key_limit), next_(key_limit + 1ull), previous_(key_limit + 1ull), in_(key_limit) {
    next_[head_] = previous_[head_] = head_;
  }
  bool access(std::uint32_t key, std::uint64_t) {
    const bool hit = in_[key] != 0;
    if (hit) {
      unlink(key);
    } else if (size_ == capacity_) {
      const std::uint32_t victim = previous_[head_];
      unlink(victim);
      in_[victim] = 0;
    } else {
      ++size_;
    }
    in_[key] = 1;
    next_[key] = next_[head_];
    previous_[key] = head_;
    previous_[next_[head_]] = key;
    next_[head_] = key;
    return hit;
  }

 private:
  void unlink(std::uint32_t key) {
    next_[previous_[key]] = next_[key];
    previous_[next_[key]] = previous_[key];
  }
  std::uint64_t capacity_;
  std::uint64_t size_ = 0;
  std::uint32_t head_;
  Keys next_, previous_;
  std::vector<std::uint8_t> in_;
};

// Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023: a tenth small, two-bit counters, promotion
// of what was read more than once, a ghost queue as long as the main queue.
class S3Fifo {
 public:
  S3Fifo(std::uint32_t key_limit, std::uint64_t capacity)
      : capacity_(capacity),
        small_limit_(std::max<std::uint64_t>(1, capacity / 10)),
        in_(key_limit),
        hits_(key_limit),
        ghost_(key_limit) {}
  bool access(std::uint32_t key, std::uint64_t) {
    if (in_[key] != 0) {
      hits_[key] = static_cast<std::uint8_t>(std::min(3, hits_[key] + 1));
      return true;
    }
    if (small_.size() + main_.size() >= capacity_) {
      if (small_.size() >= small_limit_ || main_.empty()) {
        evict_small();
      } else {
        evict_main();
      }
    }
    in_[key] = 1;
    hits_[key] = 0;
    if (ghost_[key] != 0) {
      ghost_[key] = 0;
      main_.push_back(key);
    } else {
      small_.push_back(key);
    }
    return false;
  }

 private:
  void evict_small() {
    while (!small_.empty()) {
      const std::uint32_t key = small_.front();
      small_.pop_front();
      if (hits_[key] > 1) {
        hits_[key] = 0;
        main_.push_back(key);
        if (main_.size() > capacity_ - small_limit_) return evict_main();
      } else {
        in_[key] = 0;
        ghost_[key] = ++stamp_;
        ghosts_.emplace_back(key, stamp_);
        while (ghosts_.size() > capacity_ - small_limit_) {
          const auto [old, stamp] = ghosts_.front();
          ghosts_.pop_front();
          if (ghost_[old] == stamp) ghost_[old] = 0;
        }
        return;
      }
    }
    evict_main();
  }
  void evict_main() {
    for (;;) {
      const std::uint32_t key = main_.front();
      main_.pop_front();
      if (hits_[key] == 0) {
        in_[key] = 0;
        return;
      }
      --hits_[key];
      main_.push_back(key);
    }
  }
  std::uint64_t capacity_, small_limit_;
  std::deque<std::uint32_t> small_, main_;
  std::deque<std::pair<std::uint32_t, std::uint32_t>> ghosts_;
  std::vector<std::uint8_t> in_, hits_;
  Keys ghost_;
  std::uint32_t stamp_ = 0;
};

// Belady, "A study of replacement algorithms for a virtual-storage computer", 1966, and free not to admit.
class Belady {
 public:
  Belady(const std::uint32_t* keys, std::uint64_t count, std::uint32_t key_limit, std::uint64_t capacity)
      : capacity_(capacity), next_(count), use_(key_limit, kNever) {
    Keys last(key_limit, kNever);
    for (std::uint64_t i = count; i-- > 0;) {
      next_[i] = last[keys[i]];
      last[keys[i]] = static_cast<std::uint32_t>(i);
    }
  }
  bool access(std::uint32_t key, std::uint64_t i) {
    const std::uint32_t next = next_[i];
    const bool hit = use_[key] != kNever;
    if (hit) {
      --size_;
      use_[key] = kNever;
    }
    if (next == kNever) return hit;
    if (size_ == capacity_ && !make_room(next)) return hit;
    use_[key] = next;
    farthest_.emplace(next, key);
    ++size_;
    return hit;
  }

 private:
  bool make_room(std::uint32_t next) {
    for (;;) {
      const auto [use, key] = farthest_.top();
      if (use_[key] == use) {
        if (use <= next) return false;
        use_[key] = kNever;
        --size_;
        farthest_.pop();
        return true;
      }
      farthest_.pop();
    }
  }
  std::uint64_t capacity_, size_ = 0;
  Keys next_, use_;
  std::priority_queue<std::pair<std::uint32_t, std::uint32_t>> farthest_;
};

class PastFrequency {
 public:
  PastFrequency(const std::uint32_t* keys, std::uint64_t count, std::uint32_t key_limit, std::uint64_t capacity)
      : from_(count / 2), in_(key_limit) {
    Keys uses(key_limit), order(key_limit);
    for (std::uint64_t i = 0; i < from_; ++i) ++uses[keys[i]];
    for (std::uint32_t key = 0; key < key_limit; ++key) order[key] = key;
    const std::uint64_t kept = std::min<std::uint64_t>(capacity, key_limit);
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return uses[a] > uses[b]; });
    for (std::uint64_t i = 0; i < kept; ++i) in_[order[i]] = 1;
  }
  bool access(std::uint32_t key, std::uint64_t i) const { return i >= from_ && in_[key] != 0; }

 private:
  std::uint64_t from_;
  std::vector<std::uint8_t> in_;
};

template <typename Make>
int run(Make&& make, const std::uint32_t* keys, std::uint64_t count, std::uint32_t key_limit, std::uint64_t capacity,
        std::uint64_t* hits) {
  if (capacity == 0 || count >= kNever || key_limit == kNever) return -1;
  if (std::any_of(keys, keys + count, [&](std::uint32_t key) { return key >= key_limit; })) return -1;
  try {
    auto policy = make();
    count_hits(policy, keys, count, hits);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace

int engram_bench_belady(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows,
                        uint64_t* hits) {
  return run([&] { return Belady(keys, count, key_limit, capacity_rows); }, keys, count, key_limit, capacity_rows,
             hits);
}

int engram_bench_lru(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows, uint64_t* hits) {
  return run([&] { return Lru(key_limit, capacity_rows); }, keys, count, key_limit, capacity_rows, hits);
}

int engram_bench_s3fifo(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows,
                        uint64_t* hits) {
  return run([&] { return S3Fifo(key_limit, capacity_rows); }, keys, count, key_limit, capacity_rows, hits);
}

int engram_bench_past_frequency(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows,
                                uint64_t* hits) {
  return run([&] { return PastFrequency(keys, count, key_limit, capacity_rows); }, keys, count, key_limit,
             capacity_rows, hits);
}

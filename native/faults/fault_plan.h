// Which faults a fault build injects: the list in ENGRAMD_FAULTS (io/fault_reader.h describes it), and how many of each
// there have been.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace engram {

enum FaultKind : std::size_t {
  kShort,
  kEintr,
  kEagain,
  kEio,
  kFlip,
  kTorn,
  kMisdirected,
  kLayer,
  kStale,
  kSlow,
  kKinds
};

// Kinds that deliver a wrong page, as opposed to none or a late one.
constexpr bool is_wrong(FaultKind kind) {
  return kind == kFlip || kind == kTorn || kind == kMisdirected || kind == kLayer || kind == kStale;
}

// rates: share of reads by kind, 0 .. 1. eio_at: the number of the read that fails, 0 for none.
struct FaultPlan {
  std::array<double, kKinds> rates{};
  std::uint64_t seed = 1;
  std::uint64_t eio_at = 0;
  std::uint64_t slow_ms = 20;
  double lasting = 0;
  std::string stale_file;
};

// The plan of the whole process, and what it has done. Any thread.
class Faults {
 public:
  // Once, before anything else. False, with a sentence, where the list makes no sense.
  bool prepare(std::string& error);
  // The plan as it is now: an @FILE is looked at again now and then. A list that makes no sense changes nothing.
  FaultPlan plan();

  void count(FaultKind kind) { counts_[kind].fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t next_read() { return reads_.fetch_add(1, std::memory_order_relaxed) + 1; }
  std::uint64_t next_stream() { return streams_.fetch_add(1, std::memory_order_relaxed); }
  // The counts by name.
  std::string report() const;

 private:
  bool remember_file();

  std::mutex mutex_;
  FaultPlan plan_;               // under mutex_
  std::string path_;             // set once
  std::int64_t mark_ = 0;        // under mutex_
  std::int64_t look_at_ns_ = 0;  // under mutex_
  std::array<std::atomic<std::uint64_t>, kKinds> counts_{};
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> streams_{0};
};

Faults& faults();

}  // namespace engram

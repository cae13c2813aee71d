// What a session has done so far, for the client's own metrics. Any thread adds, any thread reads.
#pragma once
#include <atomic>
#include <cstdint>

#include "engram/client.h"

namespace engram {

class SessionTotals {
 public:
  void add_reply(bool is_whole_request, uint64_t rows, uint64_t bytes) {
    if (is_whole_request) add(requests_, 1);
    add(rows_, rows);
    add(reply_bytes_, bytes);
  }
  void add_failure() { add(failed_requests_, 1); }
  void add_wait(int64_t nanoseconds) { add(wait_ns_, static_cast<uint64_t>(nanoseconds)); }
  void add_copy(int64_t nanoseconds) { add(copy_ns_, static_cast<uint64_t>(nanoseconds)); }
  void read(engram_session_totals& totals) const {
    const auto value = [](const Counter& counter) { return counter.load(std::memory_order_relaxed); };
    totals = {value(requests_),    value(failed_requests_), value(rows_),
              value(reply_bytes_), value(wait_ns_),         value(copy_ns_)};
  }

 private:
  using Counter = std::atomic<uint64_t>;
  static void add(Counter& counter, uint64_t amount) { counter.fetch_add(amount, std::memory_order_relaxed); }

  Counter requests_{0};
  Counter failed_requests_{0};
  Counter rows_{0};
  Counter reply_bytes_{0};
  Counter wait_ns_{0};
  Counter copy_ns_{0};
};

}  // namespace engram

// A request made inside the daemon: a fetch or prefetch of the control plane, whose completion goes to the event loop,
// or a piece of a saved heat list, for which its thread waits. Shared by whoever made it, who may give up waiting, and
// the worker.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/signalled_queue.h"
#include "engram/engine.h"

namespace engram {

struct FreeRows {
  void operator()(std::uint8_t* rows) const { std::free(rows); }
};
// Not cleared: a batch writes every row of a reply that is handed out.
using LocalReply = std::unique_ptr<std::uint8_t[], FreeRows>;

struct LocalRequest;
using CompletionQueue = SignalledQueue<std::shared_ptr<LocalRequest>>;

struct LocalRequest {
  engram_request request{};
  std::vector<std::uint8_t> ids;  // row_count x id_bytes
  LocalReply reply;               // row_count x row_bytes, filled by the worker; null for a prefetch
  std::uint64_t reply_bytes = 0;
  bool warm = false;  // a prefetch that is answered when its rows are there, and counts as background

  CompletionQueue* completions = nullptr;  // where its end is told; null: a thread waits for `done`
  std::uint64_t tag = 0;                   // the submitter's

  std::mutex mutex;
  std::condition_variable done;
  engram_failure outcome{};  // status EMPTY until it is done; under mutex, or the completion queue's
};

// The worker's last act for a request.
inline void finish(std::shared_ptr<LocalRequest> local, const engram_failure& outcome) {
  if (local->completions != nullptr) {
    local->outcome = outcome;
    CompletionQueue& completions = *local->completions;
    completions.push(std::move(local));
    return;
  }
  {
    const std::lock_guard lock(local->mutex);
    local->outcome = outcome;
  }
  local->done.notify_all();
}

}  // namespace engram

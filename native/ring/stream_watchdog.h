// StreamWatchdog: the thread that keeps GPU streams from waiting for ever.
//
// A stream waits for its slot's completion word with no deadline of its own. When the daemon is gone, or a use takes
// longer than its lane's deadline, this thread latches the slot's stream_lost and then stores LOST into the completion
// word, again and again whenever the word is 0, so that the stream goes on (docs/protocol.md, GPU streams). It is
// native and takes no lock that a caller holds for long, so that a stuck interpreter cannot hold it up.
//
// It also renews the session's lease on the daemon's attention while streams are at work, and wakes a worker that
// sleeps although a doorbell rings.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "engram/wire.h"

namespace engram {

class Session;

class StreamWatchdog {
 public:
  // Starts the thread. The session must outlive this object.
  explicit StreamWatchdog(Session& session);
  ~StreamWatchdog();
  StreamWatchdog(const StreamWatchdog&) = delete;
  StreamWatchdog& operator=(const StreamWatchdog&) = delete;

  void watch(engram_slot* slot, uint32_t deadline_ms);
  // Forgets the slot; false where it is in use or lost, so that its place must not be handed out again.
  bool unwatch(engram_slot* slot);

 private:
  struct Lane {
    engram_slot* slot;
    int64_t deadline_ns;
    uint64_t seen_use = 0;         // the use that is being timed, counted from 1
    int64_t pending_since_ns = 0;  // 0: none is pending
    bool lost = false;
  };

  void run();
  void look(Lane& lane, int64_t now, bool gone);
  static bool is_pending(const Lane& lane);

  Session& session_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<Lane> lanes_;  // under lock_
  bool stopping_ = false;    // under lock_
  bool was_used_ = true;     // under lock_: since the last lease
  std::thread thread_;
};

}  // namespace engram

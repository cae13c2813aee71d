// What the engine tells the daemon's event loop. A full queue drops reports of bad pages (they are counted too); the
// other kinds are bounded by the number of sessions and layers.
#pragma once

#include "engine/signalled_queue.h"
#include "engram/engine.h"

namespace engram {

class EventQueue {
 public:
  int descriptor() const { return queue_.descriptor(); }

  void push(const engram_event& event) {
    queue_.push(event, event.kind == ENGRAM_EVENT_PAGE ? kPagesCapacity : queue_.kNoLimit);
  }
  bool pop(engram_event* event) { return queue_.pop(event); }

 private:
  static constexpr std::size_t kPagesCapacity = 1024;
  SignalledQueue<engram_event> queue_;
};

}  // namespace engram

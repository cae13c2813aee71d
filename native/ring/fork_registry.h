// The sessions of this process, so that a forked child can drop its copies at once: an inherited socket would hide its
// parent's death from the daemon, and the mappings are not inherited.
#pragma once
#include <mutex>

namespace engram {

class Session;

// While it lives, no fork begins: for storing a descriptor where the child's side will find it.
class ForkPause {
 public:
  ForkPause();

 private:
  std::unique_lock<std::mutex> lock_;
};

void register_session(Session* session);
void unregister_session(Session* session);
// The calling thread's kernel id, remembered; right in a forked child too.
int current_thread();

}  // namespace engram

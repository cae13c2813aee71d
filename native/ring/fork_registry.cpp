#include "ring/fork_registry.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "ring/session.h"

namespace engram {
namespace {

thread_local int thread_id = 0;

struct Registry {
  std::mutex lock;
  std::vector<Session*> sessions;
};

// Never destroyed: sessions may end after static destructors ran.
Registry& registry() {
  static Registry& instance = *new Registry;
  return instance;
}

// The registry's lock is held across the fork, so that the child finds the list whole and the lock free.
void before_fork() {
  registry().lock.lock();
}
void after_fork_in_parent() {
  registry().lock.unlock();
}
void after_fork_in_child() {
  thread_id = 0;
  for (Session* session : registry().sessions) session->abandon_in_child();
  registry().lock.unlock();
}

}  // namespace

ForkPause::ForkPause() : lock_(registry().lock) {}

void register_session(Session* session) {
  static const int installed = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(installed);
  const std::lock_guard guard(registry().lock);
  registry().sessions.push_back(session);
}

void unregister_session(Session* session) {
  const std::lock_guard guard(registry().lock);
  std::erase(registry().sessions, session);
}

int current_thread() {
  if (thread_id == 0) thread_id = static_cast<int>(::gettid());
  return thread_id;
}

}  // namespace engram

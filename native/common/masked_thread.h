// masked_thread: starts a thread that never runs the program's signal handlers, Python's among them. Signals are for
// the threads that the program made itself.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace engram {

// Throws std::system_error where no thread can be had; the caller's own mask is as before, then too.
template <typename Function>
std::thread masked_thread(Function&& function) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } blocked;  // threads inherit the mask of who makes them
  return std::thread(std::forward<Function>(function));
}

}  // namespace engram

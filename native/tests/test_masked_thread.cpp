// Threads that take no signals, and what their making leaves of the caller's own mask.
#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>

#include <cstddef>
#include <system_error>
#include <thread>

#include "common/masked_thread.h"

namespace {

bool takes(int signal) {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return sigismember(&blocked, signal) == 0;
}

}  // namespace

TEST_CASE("the thread takes no signal, its maker takes them as before") {
  REQUIRE(takes(SIGTERM));
  bool takes_in_thread = true;
  engram::masked_thread([&] { takes_in_thread = takes(SIGTERM) || takes(SIGUSR1); }).join();
  CHECK(!takes_in_thread);
  CHECK(takes(SIGTERM));
}

TEST_CASE("where no thread can be had the maker's mask is as before") {
  pthread_attr_t usual, greedy;
  REQUIRE(pthread_getattr_default_np(&usual) == 0);
  REQUIRE(pthread_attr_init(&greedy) == 0);
  REQUIRE(pthread_attr_setstacksize(&greedy, std::size_t{1} << 60) == 0);  // more than any address space holds
  REQUIRE(pthread_setattr_default_np(&greedy) == 0);
  CHECK_THROWS_AS(engram::masked_thread([] {}).join(), std::system_error);
  pthread_setattr_default_np(&usual);
  CHECK(takes(SIGTERM));
  pthread_attr_destroy(&greedy);
  pthread_attr_destroy(&usual);
}

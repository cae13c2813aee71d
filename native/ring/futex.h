// Futexes and the pause of a spin loop.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

namespace engram {

enum class FutexScope : int { kProcess = FUTEX_PRIVATE_FLAG, kShared = 0 };

// Waits while *word is `expected`, for at most wait_ns. Returns 0, or the errno: EAGAIN, ETIMEDOUT, EINTR.
inline int futex_wait(const uint32_t* word, uint32_t expected, int64_t wait_ns, FutexScope scope) {
  timespec wait{static_cast<time_t>(wait_ns / 1'000'000'000), static_cast<long>(wait_ns % 1'000'000'000)};
  const int operation = FUTEX_WAIT | static_cast<int>(scope);
  return ::syscall(SYS_futex, word, operation, expected, &wait, nullptr, 0) == 0 ? 0 : errno;
}

inline void futex_wake_all(const uint32_t* word, FutexScope scope) {
  ::syscall(SYS_futex, word, FUTEX_WAKE | static_cast<int>(scope), INT_MAX, nullptr, nullptr, 0);
}

// Wakes at most one waiter in any process. The word may lie in memory that a client can write.
inline void futex_wake_one(const uint32_t* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE | static_cast<int>(FutexScope::kShared), 1, nullptr, nullptr, 0);
}

inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t monotonic_ns() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace engram

// set_mempolicy without libnuma: one system call with one word of nodes.
#include "engram/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace {

// From linux/mempolicy.h, which not every libc's headers bring along.
constexpr int kPreferred = 1;
constexpr int kBind = 2;
constexpr int kInterleave = 3;

}  // namespace

int engram_set_memory_policy(int policy, std::uint64_t nodes) {
  int mode = 0;
  switch (policy) {
    case ENGRAM_NUMA_PREFERRED:
      mode = kPreferred;
      break;
    case ENGRAM_NUMA_BIND:
      mode = kBind;
      break;
    case ENGRAM_NUMA_INTERLEAVE:
      mode = kInterleave;
      break;
    default:
      return EINVAL;
  }
  if (nodes == 0) return EINVAL;
  static_assert(sizeof(unsigned long) == sizeof nodes);
  // The kernel counts one bit more than it reads.
  return ::syscall(SYS_set_mempolicy, mode, &nodes, static_cast<unsigned long>(ENGRAM_NUMA_MAX_NODES + 1)) == 0 ? 0
                                                                                                                : errno;
}

/* Which NUMA nodes the kernel takes new memory from. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_NUMA_PREFERRED 0  /* these nodes while they have room, then others */
#define ENGRAM_NUMA_BIND 1       /* these nodes alone */
#define ENGRAM_NUMA_INTERLEAVE 2 /* page by page round these nodes */
#define ENGRAM_NUMA_MAX_NODES 64

/* For memory that the calling thread touches first, and the threads that it makes from now on. nodes: bit N is node N;
 * one of them where they are preferred. Returns 0 or an errno: EINVAL where a node is none or not this process's,
 * ENOSYS on a kernel without NUMA, EPERM where a seccomp filter forbids it. */
int engram_set_memory_policy(int policy, uint64_t nodes);
/* cdef-end */
#ifdef __cplusplus
}
#endif

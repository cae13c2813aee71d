/* How many pages a second a drive gives at a queue depth: what `engramd doctor` measures. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_MEASURE_MAX_DEPTH 1024

typedef struct engram_read_rate {
  uint64_t reads;
  double seconds;
  double mean_latency_us;
  double p99_latency_us; /* of the last 65,536 reads */
} engram_read_rate;

/* Reads pages of 4096 bytes at random places of a file with `depth` reads in flight, for duration_ms, through an
 * io_uring of its own. file: open for reading with O_DIRECT, file_bytes long. Returns 0, or an errno: that of the ring
 * (ENOSYS, EPERM where io_uring is forbidden) or of the first read that fails. */
int engram_measure_reads(int file, uint64_t file_bytes, uint32_t depth, uint32_t duration_ms, uint64_t seed,
                         engram_read_rate* rate);
/* cdef-end */
#ifdef __cplusplus
}
#endif

/* What the benchmarks measure the daemon against: a plain gather in this process, round trips from C, and an O_DIRECT
 * reader without a cache. Not used by the daemon.
 *
 * A gather belongs to one thread at a time. Times are seconds of CLOCK_MONOTONIC. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
typedef struct engram_bench_gather engram_bench_gather;

/* `rows` rows of row_bytes bytes in the kind of memory that the row cache uses, filled, and a reply area for
 * reply_rows rows in a memfd, populated, as an arena is. threads 1 or 2. NULL where memory is short. */
engram_bench_gather* engram_bench_gather_create(uint64_t rows, uint32_t row_bytes, uint64_t reply_rows,
                                                uint32_t threads);
/* Gathers `batches` batches of batch_rows ids each, one after the other, into the same reply area; each batch is
 * shared between the threads and ends for both before the next begins. Returns seconds, or -1 where an id or the
 * batch is out of range. */
double engram_bench_gather_run(engram_bench_gather* gather, const int64_t* ids, uint64_t batch_rows, uint64_t batches);
/* The same on one thread by one memcpy after the other, nothing asked for early. */
double engram_bench_gather_run_plain(engram_bench_gather* gather, const int64_t* ids, uint64_t batch_rows,
                                     uint64_t batches);
/* The same on one thread from rows whose first value_bytes and the rest lie apart, into a packed reply. */
double engram_bench_gather_run_split(engram_bench_gather* gather, uint32_t value_bytes, const int64_t* ids,
                                     uint64_t batch_rows, uint64_t batches);
/* The table's rows, for a peer that gathers from the same memory. */
uint8_t* engram_bench_gather_rows(engram_bench_gather* gather);
void engram_bench_gather_destroy(engram_bench_gather* gather);

/* Fetches `batches` batches of batch_rows ids through a ring session of its own, one at a time, with `pause_us` of
 * sleep before each. seconds: [batches], each one's submit to wait. spin_us as for engram_connect. Returns 0, or -1
 * with the reason in error (256 bytes). */
int engram_bench_round_trips(const char* socket_path, uint32_t layer_index, const int64_t* ids, uint64_t batch_rows,
                             uint64_t batches, int32_t spin_us, uint32_t pause_us, double* seconds, char* error);

/* Reads the page of each id (page = id / rows_per_page) with O_DIRECT and `depth` reads in flight and copies the row
 * to out, as often as it is asked for: no cache, no merging. Returns seconds, or -1 (errno in *error_number). */
double engram_bench_direct_read(const char* path, const int64_t* ids, uint64_t count, uint32_t rows_per_page,
                                uint32_t row_bytes, uint32_t depth, uint8_t* out, int* error_number);

/* Belady's hits with room for capacity_rows rows: keys are numbers below key_limit. hits[0] of all, hits[1] of the
 * second half. lru, s3fifo and past_frequency alike. Returns 0, or -1 where memory is short. */
int engram_bench_belady(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows,
                        uint64_t* hits);
int engram_bench_lru(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows, uint64_t* hits);
int engram_bench_s3fifo(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows,
                        uint64_t* hits);
/* The most frequent rows of the first half, fixed. hits[0] counts the second half alone, as hits[1] does. */
int engram_bench_past_frequency(const uint32_t* keys, uint64_t count, uint32_t key_limit, uint64_t capacity_rows,
                                uint64_t* hits);
/* cdef-end */
#ifdef __cplusplus
}
#endif

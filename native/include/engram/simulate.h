/* What the row cache would have hit: its own policy code over a sequence of keys, without rows and without I/O.
 *
 * A simulation belongs to one thread at a time; different simulations are independent. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
typedef struct engram_simulation engram_simulation;

/* An empty cache with room for capacity_rows rows (at most 2^32 - 2 are used). NULL where memory is short or no row
 * fits. About 20 bytes a row are taken, as they are touched. */
engram_simulation* engram_simulation_create(uint64_t capacity_rows);

/* Looks up `count` keys in order and admits each one that is missing. Returns how many were hits. A key is any
 * number >= 0 that is unique over layers; negative keys (rows of zeros) are passed over. */
uint64_t engram_simulation_run(engram_simulation* simulation, const int64_t* keys, uint64_t count);

/* The same, and missed[i] = 1 where keys[i] was missing, else 0. */
uint64_t engram_simulation_trace(engram_simulation* simulation, const int64_t* keys, uint64_t count, uint8_t* missed);

/* NULL is allowed. */
void engram_simulation_destroy(engram_simulation* simulation);
/* cdef-end */
#ifdef __cplusplus
}
#endif

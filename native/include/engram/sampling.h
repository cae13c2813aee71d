/* Sampled look-ups: what a cache of another size would have hit, from a small share of all rows.
 *
 * A row is in the sample when a hash of its key lies below a threshold, so either all look-ups of a row are seen or
 * none (spatial sampling: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15). A cache of C rows is
 * imitated by one of C x rate rows that sees the sample (Waldspurger et al., "Cache Modeling and Optimization using
 * Miniature Simulations", ATC '17). Misses are scaled up by 1 / rate and set against all look-ups, which are counted
 * exactly: which of the few very hot rows fell into the sample then makes no difference, since they never miss.
 *
 * A key is layer key << ENGRAM_KEY_ROW_BITS | row id; layer keys are the engine's handles, or any numbers from 1 of the
 * caller's. Thresholds are shares of 2^32; ENGRAM_SAMPLE_ALL is every row.
 */
#pragma once
#include <stdint.h>

#include "engram/engine.h"
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_SAMPLE_ALL 0x100000000
#define ENGRAM_KEY_ROW_BITS 40

/* Simulations for planning. Each object belongs to one thread at a time. */

/* Rows that a cache with this budget holds, after its own index, queues and ghosts. */
uint64_t engram_cache_rows(uint64_t budget_bytes, uint32_t row_bytes);

/* Picks the sampled ones of `count` row ids that lie column by column, `columns` to a token: columns_per_layer for each
 * layer in turn, whose layer keys count up from first_layer_key. Negative ids are skipped. Writes at most `capacity`
 * keys with their columns; returns how many there are, which may be more than capacity (the excess is not written). */
uint64_t engram_sample_rows(const int32_t* ids, uint64_t count, uint32_t columns, uint32_t columns_per_layer,
                            uint32_t first_layer_key, uint64_t threshold, uint64_t* keys, uint8_t* key_columns,
                            uint64_t capacity);

/* Keeps the keys that a lower threshold would have picked, in order; returns their number. */
uint64_t engram_thin_samples(uint64_t* keys, uint64_t count, uint64_t threshold);

/* Counts the documents in which each of a layer's rows occurs: counts[row] grows by one, up to 255, where last[row] is
 * not `document` yet (1 .. 65,535). ids as for engram_sample_rows; the layer's are `width` columns from first_column
 * on, all in 0 .. rows - 1 of both arrays, which is the caller's to see to. */
void engram_count_rows(const int32_t* ids, uint64_t tokens, uint32_t columns, uint32_t first_column, uint32_t width,
                       uint16_t document, uint8_t* counts, uint16_t* last);

/* next[i] = the position of the next look-up of keys[i], or ENGRAM_NEVER. count < 2^32 - 1. 0, or -1 without memory. */
#define ENGRAM_NEVER 0xFFFFFFFF
int engram_next_uses(const uint64_t* keys, uint64_t count, uint32_t* next);
/* Belady's MIN with a cache of `rows` that may also decline to keep a row: the fewest misses that are possible.
 * Returns the misses, or -1 without memory. */
int64_t engram_belady_run(const uint32_t* next, uint64_t count, uint64_t rows, uint8_t* missed);

/* A running engine's own curve, and recording. Any thread; only demand is sampled, no prefetch. */

typedef struct engram_curve_point {
  uint64_t rows;               /* room of the imitated cache, of all row sizes together */
  uint64_t row_capacity_bytes; /* bytes of those rows alone */
  uint64_t lookups;            /* all rows asked for, exact */
  uint64_t sampled;            /* look-ups that the imitation saw */
  uint64_t lost;               /* look-ups of all points' samples that came too fast to be seen */
  double misses;               /* scaled up */
} engram_curve_point;

typedef struct engram_record_state {
  uint64_t lookups; /* rows asked for since the recording began */
  uint64_t lost;    /* sampled look-ups that found the buffer full */
  uint64_t left;    /* samples that wait to be taken */
} engram_record_state;

/* Begins to imitate caches from 1/512 of the served rows to all of them, two sizes for each power of two, each with at
 * most simulated_rows rows (a few tens of bytes each). A second call, as for rows of another size, begins a new curve
 * from nothing. 0, or -1 with a sentence, and what was there goes on. */
int engram_engine_start_curve(engram_engine* engine, uint32_t simulated_rows, char* error, uint64_t error_bytes);
/* The points from the smallest on, filled up to capacity; the return value is the number there are (0: not started). */
uint64_t engram_engine_read_curve(engram_engine* engine, engram_curve_point* points, uint64_t capacity);

/* Begins a recording into a buffer of `capacity` samples; -1 with a sentence where one runs already. A recording that
 * is not looked after for 30 seconds ends by itself. */
int engram_engine_start_recording(engram_engine* engine, uint64_t threshold, uint64_t capacity, char* error,
                                  uint64_t error_bytes);
/* Takes samples off the buffer, oldest first; returns their number, or -1 where no recording runs. A lower threshold
 * than before applies from now on. */
int64_t engram_engine_take_samples(engram_engine* engine, uint64_t threshold, uint64_t* keys, uint64_t capacity,
                                   engram_record_state* state);
void engram_engine_stop_recording(engram_engine* engine);
/* cdef-end */
#ifdef __cplusplus
}
#endif

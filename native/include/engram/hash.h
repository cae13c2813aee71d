/* N-gram row ids: token ids -> row ids, as DeepSeek-V4.1 Engram defines them.
 * Pure arithmetic: no allocation, no globals, safe from any number of threads. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_HASH_MAX_NGRAM 8
/* Most columns of all layers together: layers * (max_ngram - 1) * heads. */
#define ENGRAM_HASH_MAX_COLUMNS 65536

/* Everything that one layer's hash needs. Columns are ordered (order - 2) * heads + head. */
typedef struct engram_hash_layer {
  int64_t multipliers[8];      /* one per shift 0 .. max_ngram - 1; odd */
  const int64_t* head_sizes;   /* [(max_ngram - 1) * heads] primes */
  const int64_t* head_offsets; /* exclusive running sum of head_sizes */
} engram_hash_layer;

/* Finds the head sizes of every layer: for each layer in order, for each n-gram order, restart just above
 * vocab_size - 1 and take the next `heads` primes that no earlier place has used. out: int64
 * [layers][(max_ngram - 1) * heads]. Returns 0, or -1 where an argument is out of range: vocab_size < 1, layers or
 * heads 0, max_ngram outside 2 .. ENGRAM_HASH_MAX_NGRAM, more than ENGRAM_HASH_MAX_COLUMNS columns, out NULL, or a
 * prime past INT64_MAX. */
int engram_head_sizes(int64_t vocab_size, uint32_t layers, uint32_t max_ngram, uint32_t heads, int64_t* out);

/* Row ids of `count` tokens in a row. token_map[token] is the compressed id. tokens, dead (or NULL) and the
 * history before them (oldest first, history_count <= max_ngram - 1; history_dead or NULL) belong to one
 * sequence. A position before the history's start, or behind a dead one, hashes as pad_id (a compressed id).
 * out: int32 [count][layers][(max_ngram - 1) * heads]; it must not overlap an input.
 * Any multiplier and compressed id is legal: products wrap modulo 2^64, their XOR is taken as a signed number, and
 * the remainder is the floored one (numpy's, never negative). A head size must lie in 1 .. 2^31 - 1, an offset must be
 * >= 0, and offset + size - 1 must be <= 2^31 - 1.
 * Returns -1 when done, else the flat index of the first token outside 0 .. token_map_size - 1 (history first: a bad
 * history token i returns -2 - i); out is then unspecified. Returns INT64_MIN, with nothing written, where any other
 * argument is out of range. A dead position's token must be in range too. */
int64_t engram_hash_rows(const engram_hash_layer* layers, uint32_t layer_count, uint32_t max_ngram, uint32_t heads,
                         const int32_t* token_map, uint32_t token_map_size, int32_t pad_id, const int64_t* tokens,
                         const uint8_t* dead, uint64_t count, const int64_t* history, const uint8_t* history_dead,
                         uint32_t history_count, int32_t* out);
/* cdef-end */
#ifdef __cplusplus
}
#endif

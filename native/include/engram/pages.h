/* Pages of a packed table: encode, verify, compare, and the rows of synthetic checkpoints. See docs/table_format.md.
 * Pure functions of their arguments; safe from any number of threads. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_PAGE_TRAILER_BYTES 64
#define ENGRAM_MIN_ROW_BYTES 16
#define ENGRAM_MAX_ROW_BYTES 65536

/* What a layer's pages depend on. */
typedef struct engram_page_format {
  uint8_t table_id[16];
  uint64_t generation;
  uint64_t rows; /* of the layer */
  uint32_t layer;
  uint32_t row_bytes;
  uint32_t value_bytes; /* first part of a row; the rest is the scale part (may be empty) */
  uint32_t reserved;    /* 0 */
} engram_page_format;

/* Where a check failed. */
typedef struct engram_page_fault {
  uint64_t page;
  uint64_t row;    /* row id of the page's first bad row, or UINT64_MAX where the trailer or the padding is bad */
  uint32_t reason; /* ENGRAM_FAULT_* */
  uint32_t reserved;
} engram_page_fault;

#define ENGRAM_FAULT_ROW 1     /* a row's checksum */
#define ENGRAM_FAULT_TRAILER 2 /* magic, version, address or checksum of the trailer */
#define ENGRAM_FAULT_PADDING 3 /* bytes that must be zero */
#define ENGRAM_FAULT_SOURCE 4  /* a row differs from the source (compare only) */

uint32_t engram_page_bytes(uint32_t row_bytes);    /* 0 where row_bytes is out of range */
uint32_t engram_rows_per_page(uint32_t row_bytes); /* 0 where row_bytes is out of range */

/* CRC32C (Castagnoli) of bytes, continuing from `crc` (0 to begin). */
uint32_t engram_crc32c(uint32_t crc, const void* bytes, uint64_t count);

/* Interleaves rows into `page_count` pages from `first_page` on. values and scales point to the first row of
 * first_page; scales is NULL where the format has no scale part. out: page_count * page_bytes. Returns 0, or -1 on a
 * bad argument. */
int engram_pages_encode(const engram_page_format* format, uint64_t first_page, uint64_t page_count, const void* values,
                        const void* scales, void* out);

/* Checks every row, trailer and padding byte of the pages. Fills up to fault_capacity faults (one per bad page, the
 * first reason found); returns the number of bad pages, or -1 on a bad argument. */
int64_t engram_pages_verify(const engram_page_format* format, uint64_t first_page, uint64_t page_count,
                            const void* pages, engram_page_fault* faults, uint64_t fault_capacity);

/* Compares the pages' rows with the source bytes (as for encode). Same result as engram_pages_verify. */
int64_t engram_pages_compare(const engram_page_format* format, uint64_t first_page, uint64_t page_count,
                             const void* pages, const void* values, const void* scales, engram_page_fault* faults,
                             uint64_t fault_capacity);

/* Bytes [begin, end) of `row_count` synthetic rows from first_row on (a part of each row), tightly packed into out.
 * value_bytes says where the scale part of the packed row begins. */
int engram_synth_rows(uint64_t seed, uint32_t layer, uint64_t first_row, uint64_t row_count, uint32_t value_bytes,
                      uint32_t begin, uint32_t end, void* out);
/* cdef-end */
#ifdef __cplusplus
}
#endif

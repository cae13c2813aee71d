// Pages of a packed table inside the engine: where rows and checksums lie, and the check of a single row, which every
// row read from a drive passes before it leaves. The C ABI over whole pages is engram/pages.h; the format
// docs/table_format.md.
#pragma once
#include <cstdint>
#include <cstring>

#include "engram/pages.h"

namespace engram {

constexpr uint32_t kPageUnitBytes = 4096;
constexpr uint32_t kChecksumBytes = 4;

// What a layer's row checks start from. Made once per layer (make_row_seed); immutable afterwards, shared by all
// threads.
struct RowSeed {
  uint32_t crc = 0;           // CRC32C of table id | generation | layer | zero
  uint32_t row_bytes = 0;     // the size that the constants below belong to
  uint32_t stream_words = 0;  // a third of a row in 8-byte words; 0: too short to split
  uint64_t shift_two = 0;     // moves a checksum past two thirds of a row
  uint64_t shift_one = 0;     // moves a checksum past one third of a row
};

RowSeed make_row_seed(const engram_page_format& format);

// The checksum stored for a row: never 0.
uint32_t row_checksum(const RowSeed& seed, uint64_t row, const uint8_t* bytes);

// Whether these are the bytes of exactly this row of this table, generation and layer. `row_bytes` must be the seed's.
inline bool row_matches(const RowSeed& seed, uint64_t row, const uint8_t* bytes, uint32_t row_bytes, uint32_t stored) {
  return row_bytes == seed.row_bytes && row_checksum(seed, row, bytes) == stored;
}

// Layout of the pages of one row size. Cheap to make; row r is row r % rows_per_page of page r / rows_per_page.
struct PageLayout {
  explicit PageLayout(uint32_t row_bytes_)
      : row_bytes(row_bytes_),
        page_bytes(engram_page_bytes(row_bytes_)),
        rows_per_page(engram_rows_per_page(row_bytes_)) {}

  uint32_t row_offset(uint32_t slot) const { return slot * row_bytes; }
  uint32_t checksums_offset() const { return trailer_offset() - rows_per_page * kChecksumBytes; }
  uint32_t trailer_offset() const { return page_bytes - ENGRAM_PAGE_TRAILER_BYTES; }

  uint32_t stored_checksum(const uint8_t* page, uint32_t slot) const {
    uint32_t stored;
    std::memcpy(&stored, page + checksums_offset() + slot * kChecksumBytes, sizeof stored);
    return stored;
  }

  uint32_t row_bytes;
  uint32_t page_bytes;
  uint32_t rows_per_page;
};

}  // namespace engram

// Whole pages: encode, verify, compare. The C ABI of engram/pages.h.
#include "engram/pages.h"

#include <algorithm>
#include <cstddef>

#include "common/crc32c.h"
#include "pages/page_codec.h"

namespace engram {
namespace {

constexpr uint64_t kMaxRows = uint64_t{1} << 40;
constexpr uint16_t kPageVersion = 1;

// The last 64 bytes of a page, as they lie on disk.
struct Trailer {
  char magic[8];
  uint16_t version;
  uint16_t rows;
  uint32_t layer;
  uint64_t generation;
  uint64_t page;
  uint8_t table_id[16];
  uint32_t row_bytes;
  uint8_t zero[8];
  uint32_t crc;
};
static_assert(sizeof(Trailer) == ENGRAM_PAGE_TRAILER_BYTES && offsetof(Trailer, layer) == 12 &&
              offsetof(Trailer, generation) == 16 && offsetof(Trailer, page) == 24 &&
              offsetof(Trailer, table_id) == 32 && offsetof(Trailer, row_bytes) == 48 &&
              offsetof(Trailer, zero) == 52 && offsetof(Trailer, crc) == 60);

// One layer's pages: the format with everything that follows from it.
class PageCodec {
 public:
  explicit PageCodec(const engram_page_format& format)
      : format_(format), layout_(format.row_bytes), seed_(make_row_seed(format)) {}

  uint32_t page_bytes() const { return layout_.page_bytes; }
  uint64_t first_row(uint64_t page) const { return page * layout_.rows_per_page; }
  uint32_t rows_in(uint64_t page) const {
    return static_cast<uint32_t>(std::min<uint64_t>(layout_.rows_per_page, format_.rows - first_row(page)));
  }

  void encode(uint64_t page, const uint8_t* values, const uint8_t* scales, uint8_t* out) const {
    const uint32_t rows = rows_in(page);
    const uint32_t scale_bytes = format_.row_bytes - format_.value_bytes;
    uint8_t* checksums = out + layout_.checksums_offset();
    for (uint32_t slot = 0; slot < rows; slot++) {
      uint8_t* row = out + layout_.row_offset(slot);
      std::memcpy(row, values + size_t{slot} * format_.value_bytes, format_.value_bytes);
      if (scale_bytes != 0) std::memcpy(row + format_.value_bytes, scales + size_t{slot} * scale_bytes, scale_bytes);
      const uint32_t checksum = row_checksum(seed_, first_row(page) + slot, row);
      std::memcpy(checksums + slot * kChecksumBytes, &checksum, kChecksumBytes);
    }
    uint8_t* rows_end = out + layout_.row_offset(rows);
    std::memset(rows_end, 0, static_cast<size_t>(checksums - rows_end));
    std::memset(checksums + rows * kChecksumBytes, 0, size_t{layout_.rows_per_page - rows} * kChecksumBytes);
    Trailer trailer = expected_trailer(page);
    std::memcpy(out + layout_.trailer_offset(), &trailer, sizeof trailer);
    trailer.crc = trailer_crc(out);
    std::memcpy(out + layout_.trailer_offset(), &trailer, sizeof trailer);
  }

  // False, with the fault filled in, where the page is not exactly as encode would have left it.
  bool verify(uint64_t page, const uint8_t* bytes, engram_page_fault* fault) const {
    const uint32_t rows = rows_in(page);
    for (uint32_t slot = 0; slot < rows; slot++) {
      const uint8_t* row = bytes + layout_.row_offset(slot);
      if (!row_matches(seed_, first_row(page) + slot, row, format_.row_bytes, layout_.stored_checksum(bytes, slot))) {
        *fault = {page, first_row(page) + slot, ENGRAM_FAULT_ROW, 0};
        return false;
      }
    }
    Trailer expected = expected_trailer(page);
    expected.crc = trailer_crc(bytes);
    if (std::memcmp(bytes + layout_.trailer_offset(), &expected, sizeof expected) != 0) {
      *fault = {page, UINT64_MAX, ENGRAM_FAULT_TRAILER, 0};
      return false;
    }
    const uint8_t* rows_end = bytes + layout_.row_offset(rows);
    const uint8_t* checksums = bytes + layout_.checksums_offset();
    if (!all_zero(rows_end, checksums) ||
        !all_zero(checksums + rows * kChecksumBytes, bytes + layout_.trailer_offset())) {
      *fault = {page, UINT64_MAX, ENGRAM_FAULT_PADDING, 0};
      return false;
    }
    return true;
  }

  bool compare(uint64_t page, const uint8_t* bytes, const uint8_t* values, const uint8_t* scales,
               engram_page_fault* fault) const {
    const uint32_t scale_bytes = format_.row_bytes - format_.value_bytes;
    for (uint32_t slot = 0; slot < rows_in(page); slot++) {
      const uint8_t* row = bytes + layout_.row_offset(slot);
      if (std::memcmp(row, values + size_t{slot} * format_.value_bytes, format_.value_bytes) != 0 ||
          (scale_bytes != 0 &&
           std::memcmp(row + format_.value_bytes, scales + size_t{slot} * scale_bytes, scale_bytes) != 0)) {
        *fault = {page, first_row(page) + slot, ENGRAM_FAULT_SOURCE, 0};
        return false;
      }
    }
    return true;
  }

 private:
  Trailer expected_trailer(uint64_t page) const {
    Trailer trailer{};
    std::memcpy(trailer.magic, "ENGRPAGE", 8);
    trailer.version = kPageVersion;
    trailer.rows = static_cast<uint16_t>(rows_in(page));
    trailer.layer = format_.layer;
    trailer.generation = format_.generation;
    trailer.page = page;
    std::memcpy(trailer.table_id, format_.table_id, 16);
    trailer.row_bytes = format_.row_bytes;
    return trailer;
  }

  uint32_t trailer_crc(const uint8_t* page) const {
    const uint32_t begin = layout_.checksums_offset();
    return crc32c(0, page + begin, layout_.trailer_offset() + offsetof(Trailer, crc) - begin);
  }

  static bool all_zero(const uint8_t* begin, const uint8_t* end) {
    return std::all_of(begin, end, [](uint8_t byte) { return byte == 0; });
  }

  const engram_page_format& format_;
  const PageLayout layout_;
  const RowSeed seed_;
};

bool is_valid(const engram_page_format* format, uint64_t first_page, uint64_t page_count) {
  if (format == nullptr || format->reserved != 0) return false;
  if (format->row_bytes < ENGRAM_MIN_ROW_BYTES || format->row_bytes > ENGRAM_MAX_ROW_BYTES) return false;
  if (format->value_bytes == 0 || format->value_bytes > format->row_bytes) return false;
  if (format->rows == 0 || format->rows > kMaxRows) return false;
  const uint64_t rows_per_page = engram_rows_per_page(format->row_bytes);
  const uint64_t pages = (format->rows + rows_per_page - 1) / rows_per_page;
  return first_page <= pages && page_count <= pages - first_page;
}

// Calls check(page, index, fault) for each page and collects the faults.
template <typename Check>
int64_t collect_faults(uint64_t first_page, uint64_t page_count, engram_page_fault* faults, uint64_t fault_capacity,
                       const Check& check) {
  int64_t bad = 0;
  for (uint64_t index = 0; index < page_count; index++) {
    engram_page_fault fault;
    if (check(first_page + index, index, &fault)) continue;
    if (static_cast<uint64_t>(bad) < fault_capacity) faults[bad] = fault;
    bad++;
  }
  return bad;
}

}  // namespace
}  // namespace engram

using engram::PageCodec;

extern "C" {

uint32_t engram_page_bytes(uint32_t row_bytes) {
  if (row_bytes < ENGRAM_MIN_ROW_BYTES || row_bytes > ENGRAM_MAX_ROW_BYTES) return 0;
  const uint32_t needed = row_bytes + engram::kChecksumBytes + ENGRAM_PAGE_TRAILER_BYTES;
  return (needed + engram::kPageUnitBytes - 1) / engram::kPageUnitBytes * engram::kPageUnitBytes;
}

uint32_t engram_rows_per_page(uint32_t row_bytes) {
  if (row_bytes < ENGRAM_MIN_ROW_BYTES || row_bytes > ENGRAM_MAX_ROW_BYTES) return 0;
  const uint32_t fit = (engram::kPageUnitBytes - ENGRAM_PAGE_TRAILER_BYTES) / (row_bytes + engram::kChecksumBytes);
  return fit > 0 ? fit : 1;
}

uint32_t engram_crc32c(uint32_t crc, const void* bytes, uint64_t count) {
  return engram::crc32c(crc, bytes, count);
}

int engram_pages_encode(const engram_page_format* format, uint64_t first_page, uint64_t page_count, const void* values,
                        const void* scales, void* out) {
  if (!engram::is_valid(format, first_page, page_count)) return -1;
  const uint32_t scale_bytes = format->row_bytes - format->value_bytes;
  if (page_count == 0) return 0;
  if (values == nullptr || out == nullptr || (scale_bytes != 0 && scales == nullptr)) return -1;
  const PageCodec codec(*format);
  for (uint64_t index = 0; index < page_count; index++) {
    const uint64_t row = codec.first_row(first_page + index) - codec.first_row(first_page);
    codec.encode(first_page + index, static_cast<const uint8_t*>(values) + row * format->value_bytes,
                 scale_bytes != 0 ? static_cast<const uint8_t*>(scales) + row * scale_bytes : nullptr,
                 static_cast<uint8_t*>(out) + index * codec.page_bytes());
  }
  return 0;
}

int64_t engram_pages_verify(const engram_page_format* format, uint64_t first_page, uint64_t page_count,
                            const void* pages, engram_page_fault* faults, uint64_t fault_capacity) {
  if (!engram::is_valid(format, first_page, page_count)) return -1;
  if (page_count == 0) return 0;
  if (pages == nullptr || (faults == nullptr && fault_capacity != 0)) return -1;
  const PageCodec codec(*format);
  const uint8_t* bytes = static_cast<const uint8_t*>(pages);
  return engram::collect_faults(first_page, page_count, faults, fault_capacity,
                                [&](uint64_t page, uint64_t index, engram_page_fault* fault) {
                                  return codec.verify(page, bytes + index * codec.page_bytes(), fault);
                                });
}

int64_t engram_pages_compare(const engram_page_format* format, uint64_t first_page, uint64_t page_count,
                             const void* pages, const void* values, const void* scales, engram_page_fault* faults,
                             uint64_t fault_capacity) {
  if (!engram::is_valid(format, first_page, page_count)) return -1;
  const uint32_t scale_bytes = format->row_bytes - format->value_bytes;
  if (page_count == 0) return 0;
  if (pages == nullptr || values == nullptr || (scale_bytes != 0 && scales == nullptr) ||
      (faults == nullptr && fault_capacity != 0)) {
    return -1;
  }
  const PageCodec codec(*format);
  const uint8_t* bytes = static_cast<const uint8_t*>(pages);
  return engram::collect_faults(
      first_page, page_count, faults, fault_capacity, [&](uint64_t page, uint64_t index, engram_page_fault* fault) {
        const uint64_t row = codec.first_row(page) - codec.first_row(first_page);
        return codec.compare(
            page, bytes + index * codec.page_bytes(), static_cast<const uint8_t*>(values) + row * format->value_bytes,
            scale_bytes != 0 ? static_cast<const uint8_t*>(scales) + row * scale_bytes : nullptr, fault);
      });
}

}  // extern "C"

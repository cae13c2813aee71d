#include "engine/resident_rows.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/crc32c.h"
#include "common/machine_page.h"

namespace engram {
namespace {

constexpr std::uint64_t kAlignment = 4096;
constexpr std::uint64_t kPieceBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kTrailerMagic = 0x4D454D4E45444953;
constexpr std::uint32_t kTrailerVersion = 1;

std::uint64_t aligned(std::uint64_t offset) {
  return round_up(offset, kAlignment);
}

std::uint64_t pages_of(const engram_page_format& format, const PageLayout& layout) {
  return (format.rows + layout.rows_per_page - 1) / layout.rows_per_page;
}

}  // namespace

struct ResidentRows::Trailer {
  std::uint64_t magic = kTrailerMagic;
  std::uint32_t version = kTrailerVersion;
  std::uint32_t row_layout = 0;
  engram_page_format format{};
  std::uint64_t complete = 0;
};

ResidentRows::Places ResidentRows::places_of(const engram_page_format& format, const PageLayout& layout,
                                             std::uint32_t row_layout) {
  Places places;
  const std::uint64_t rows_bytes = format.rows * format.row_bytes;
  places.scales_offset = rows_bytes;
  std::uint64_t end = rows_bytes;
  if (row_layout == ENGRAM_LAYOUT_SPLIT) {
    places.scales_offset = aligned(format.rows * format.value_bytes);
    end = places.scales_offset + format.rows * (format.row_bytes - format.value_bytes);
  }
  places.digests_offset = aligned(end);
  places.trailer_offset = aligned(places.digests_offset + pages_of(format, layout) * sizeof(std::uint32_t));
  places.bytes = places.trailer_offset + kAlignment;
  return places;
}

ResidentRows::ResidentRows(const engram_page_format& format, std::uint32_t row_layout, UniqueFd kept)
    : format_(format),
      layout_(format.row_bytes),
      row_layout_(row_layout),
      places_(places_of(format_, layout_, row_layout_)),
      loaded_((pages_of(format_, layout_) + 63) / 64) {
  if (kept && take_over(std::move(kept))) return;
  memory_ = SealedMemory::create("engramd-resident", places_.bytes, error_);
  if (memory_.valid()) {
    const Trailer made = trailer();
    std::memcpy(memory_.data() + places_.trailer_offset, &made, sizeof made);
  }
}

ResidentRows::Trailer ResidentRows::trailer() const {
  static_assert(std::has_unique_object_representations_v<Trailer>, "it is compared as bytes, so it has no padding");
  Trailer made;
  made.row_layout = row_layout_;
  made.format = format_;
  return made;
}

bool ResidentRows::take_over(UniqueFd kept) {
  SealedMemory memory = SealedMemory::adopt(std::move(kept), places_.bytes, kept_refusal_);
  if (!memory.valid()) return false;
  Trailer wanted = trailer();
  wanted.complete = 1;
  if (std::memcmp(memory.data() + places_.trailer_offset, &wanted, sizeof wanted) != 0) {
    kept_refusal_ = "it holds other rows, another layout, or not all rows";
    return false;
  }
  memory_ = std::move(memory);
  return true;
}

std::uint64_t ResidentRows::rows_in(std::uint64_t page) const {
  return std::min<std::uint64_t>(layout_.rows_per_page, format_.rows - page * layout_.rows_per_page);
}

// The page's number is in it, so that pages that changed places are noticed.
std::uint32_t ResidentRows::digest(std::uint64_t page) const {
  const std::uint64_t first = page * layout_.rows_per_page;
  const std::uint64_t count = rows_in(page);
  const std::uint32_t crc = crc32c(0, &page, sizeof page);
  if (!is_split()) return crc32c(crc, row(first), count * format_.row_bytes);
  const std::uint64_t scale_bytes = format_.row_bytes - format_.value_bytes;
  const std::uint32_t of_values = crc32c(crc, values() + first * format_.value_bytes, count * format_.value_bytes);
  return crc32c(of_values, scales() + first * scale_bytes, count * scale_bytes);
}

void ResidentRows::set_loaded(std::uint64_t page) {
  loaded_[page / 64].fetch_or(std::uint64_t{1} << (page % 64), std::memory_order_release);
  used_bytes_.store(used_bytes_.load(std::memory_order_relaxed) + rows_in(page) * format_.row_bytes,
                    std::memory_order_relaxed);
}

void ResidentRows::store_page(std::uint64_t page, const std::uint8_t* rows) {
  const std::uint64_t first = page * layout_.rows_per_page;
  const std::uint64_t count = rows_in(page);
  if (!is_split()) {
    std::memcpy(memory_.data() + first * format_.row_bytes, rows, count * format_.row_bytes);
  } else {
    const std::uint32_t scale_bytes = format_.row_bytes - format_.value_bytes;
    std::uint8_t* to_values = memory_.data() + first * format_.value_bytes;
    std::uint8_t* to_scales = memory_.data() + places_.scales_offset + first * scale_bytes;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint8_t* from = rows + i * format_.row_bytes;
      std::memcpy(to_values + i * format_.value_bytes, from, format_.value_bytes);
      std::memcpy(to_scales + i * scale_bytes, from + format_.value_bytes, scale_bytes);
    }
  }
  digests()[page] = digest(page);
  set_loaded(page);
}

bool ResidentRows::take_over_page(std::uint64_t page) {
  if (digests()[page] != digest(page)) return false;
  set_loaded(page);
  return true;
}

bool ResidentRows::collapse_piece(std::uint64_t piece) {
  const std::uint64_t begin = piece * kPieceBytes;
  if (begin >= places_.digests_offset) return false;
  return memory_.collapse(begin, std::min(kPieceBytes, places_.digests_offset - begin));
}

void ResidentRows::finish(bool all_good) {
  if (all_good && memory_.writable()) {
    Trailer made = trailer();
    made.complete = 1;
    std::memcpy(memory_.data() + places_.trailer_offset, &made, sizeof made);
  }
  finished_.store(true, std::memory_order_release);
  if (all_good) complete_.store(true, std::memory_order_release);
}

engram_resident_memory ResidentRows::memory() const {
  engram_resident_memory memory{};
  memory.descriptor = memory_.file();
  memory.row_layout = row_layout_;
  memory.rows = format_.rows;
  memory.row_bytes = format_.row_bytes;
  memory.value_bytes = format_.value_bytes;
  memory.scales_offset = is_split() ? places_.scales_offset : 0;
  memory.bytes = memory_.file_bytes();
  return memory;
}

}  // namespace engram

// All rows of a layer in DRAM, in row order, filled page by page in the background by one loader thread, in memory that
// can be handed out read-only and that outlives the process where somebody keeps its descriptor.
//
// A page's bit is set after its rows are in place (release); a reader tests it (acquire) before it touches them. Once
// all pages are there `complete` is set and bits are not looked at any more.
//
// The memory: rows (packed: rows x row_bytes; split: rows x value_bytes, then rows x scale_bytes), a digest of each
// page's rows, a trailer that says what they are. A digest is taken when the rows have just passed the checksums of
// their page on the drive. Whoever takes the memory over checks each page against its digest before it serves from it:
// that costs a pass at the speed of memory, and notices whatever happened to the rows since.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/sealed_memory.h"
#include "engram/engine.h"
#include "pages/page_codec.h"

namespace engram {

class ResidentRows {
 public:
  // row_layout: split only for rows that have two parts. kept: memory of an earlier process (or none). It is taken over
  // where it holds exactly these rows in this layout; else new memory is made and kept_refusal() says why.
  ResidentRows(const engram_page_format& format, std::uint32_t row_layout, UniqueFd kept);

  bool valid() const { return memory_.valid(); }
  const std::string& error() const { return error_; }
  bool is_taken_over() const { return !memory_.writable(); }
  const std::string& kept_refusal() const { return kept_refusal_; }

  std::uint32_t row_layout() const { return row_layout_; }
  bool is_split() const { return row_layout_ == ENGRAM_LAYOUT_SPLIT; }
  // Packed only.
  const std::uint8_t* row(std::uint64_t row) const { return memory_.data() + row * format_.row_bytes; }
  // Split only: the first row's.
  const std::uint8_t* values() const { return memory_.data(); }
  const std::uint8_t* scales() const { return memory_.data() + places_.scales_offset; }
  bool has_page(std::uint64_t page) const {
    return (loaded_[page / 64].load(std::memory_order_acquire) >> (page % 64) & 1) != 0;
  }
  bool complete() const { return complete_.load(std::memory_order_acquire); }

  // Loader thread only. store_page: rows as they lie in a page. take_over_page: false where the digest is wrong.
  void store_page(std::uint64_t page, const std::uint8_t* rows);
  bool take_over_page(std::uint64_t page);
  // Puts rows into huge pages piece by piece, as far as the kernel will; false where it will not.
  bool collapse_piece(std::uint64_t piece);
  // All pages have been tried; `all_good` = each one is there.
  void finish(bool all_good);
  bool finished() const { return finished_.load(std::memory_order_acquire); }

  std::uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t metadata_bytes() const {
    return loaded_.size() * sizeof(std::uint64_t) + (places_.bytes - places_.digests_offset);
  }
  std::uint64_t hugetlb_bytes() const { return memory_.kind() == SealedMemory::Kind::hugetlb ? memory_.bytes() : 0; }

  // Descriptor and geometry for whoever may read the rows; the descriptor stays owned here.
  engram_resident_memory memory() const;

 private:
  struct Places {
    std::uint64_t scales_offset = 0;  // split; else where the rows end
    std::uint64_t digests_offset = 0;
    std::uint64_t trailer_offset = 0;
    std::uint64_t bytes = 0;
  };
  struct Trailer;
  static Places places_of(const engram_page_format& format, const PageLayout& layout, std::uint32_t row_layout);
  Trailer trailer() const;
  bool take_over(UniqueFd kept);
  std::uint64_t rows_in(std::uint64_t page) const;
  std::uint32_t digest(std::uint64_t page) const;
  std::uint32_t* digests() const { return reinterpret_cast<std::uint32_t*>(memory_.data() + places_.digests_offset); }
  void set_loaded(std::uint64_t page);

  const engram_page_format format_;
  const PageLayout layout_;
  const std::uint32_t row_layout_;
  const Places places_;
  SealedMemory memory_;
  std::string error_;
  std::string kept_refusal_;
  std::vector<std::atomic<std::uint64_t>> loaded_;
  std::atomic<bool> finished_{false};
  std::atomic<bool> complete_{false};
  std::atomic<std::uint64_t> used_bytes_{0};
};

}  // namespace engram

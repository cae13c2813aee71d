// One layer of one generation of a table: where its pages are, how its rows are checked, where its rows lie in DRAM,
// its counters. Geometry and files do not change while it is served; the placement may. A retired layer takes no new
// batches and gives its files up when the last one has ended.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/huge_memory.h"
#include "common/unique_fd.h"
#include "engine/counters.h"
#include "engram/engine.h"
#include "pages/page_codec.h"

namespace engram {

class RowCache;

// All rows of a layer in DRAM, in row order, filled page by page in the background by one loader thread. A page's bit
// is set after its rows are in place (release); a reader tests it (acquire) before it touches them. Once all pages are
// there `complete` is set and bits are not looked at any more.
class ResidentRows {
 public:
  ResidentRows(std::uint64_t rows, const PageLayout& layout);

  bool valid() const { return memory_.valid(); }
  const std::uint8_t* row(std::uint64_t row) const { return memory_.data() + row * row_bytes_; }
  bool has_page(std::uint64_t page) const {
    return (loaded_[page / 64].load(std::memory_order_acquire) >> (page % 64) & 1) != 0;
  }
  bool complete() const { return complete_.load(std::memory_order_acquire); }

  // Loader thread only.
  void store_page(std::uint64_t page, const std::uint8_t* rows, std::uint32_t row_count);
  // All pages have been tried; `all_good` = each one is there.
  void finish(bool all_good) {
    finished_.store(true, std::memory_order_release);
    if (all_good) complete_.store(true, std::memory_order_release);
  }
  bool finished() const { return finished_.load(std::memory_order_acquire); }

  std::uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t bitmap_bytes() const { return loaded_.size() * sizeof(std::uint64_t); }
  std::uint64_t hugetlb_bytes() const { return memory_.kind() == HugeMemory::Kind::hugetlb ? memory_.bytes() : 0; }

 private:
  std::uint32_t row_bytes_;
  std::uint32_t rows_per_page_;
  HugeMemory memory_;
  std::vector<std::atomic<std::uint64_t>> loaded_;
  std::atomic<bool> finished_{false};
  std::atomic<bool> complete_{false};
  std::atomic<std::uint64_t> used_bytes_{0};
};

// A layer's rows in DRAM: all of them, or those that the cache holds (shared with other layers of this row size), or
// none.
struct Placement {
  std::shared_ptr<RowCache> cache;
  std::shared_ptr<ResidentRows> resident;
};

class Layer {
 public:
  // Duplicates the descriptors, checks sizes and alignment; on failure returns nullptr and says why.
  static std::unique_ptr<Layer> open(const engram_layer_options& options, std::uint32_t handle, std::uint32_t workers,
                                     std::string& error);

  struct Place {
    int file;
    std::uint64_t offset;
  };
  Place place(std::uint64_t page) const {
    const std::uint64_t stripe = page / stripe_pages_;
    const std::uint64_t file_page = stripe / files_.size() * stripe_pages_ + page % stripe_pages_;
    return {files_[stripe % files_.size()].get(), file_page * layout.page_bytes};
  }
  std::uint64_t page_of(std::uint64_t row) const { return row / layout.rows_per_page; }
  std::uint32_t rows_in_page(std::uint64_t page) const {
    const std::uint64_t first = page * layout.rows_per_page;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(layout.rows_per_page, rows - first));
  }
  static bool is_valid(const engram_layer_policy& policy);
  std::uint64_t stripe_pages() const { return stripe_pages_; }
  std::uint64_t pages() const { return (rows + layout.rows_per_page - 1) / layout.rows_per_page; }
  std::uint64_t bytes() const { return rows * row_bytes; }

  // Whether a row as it lies in a page buffer is the right one.
  bool row_ok(const std::uint8_t* page, std::uint64_t row, std::uint32_t index) const {
    return row_matches(seed, row, page + layout.row_offset(index), row_bytes, layout.stored_checksum(page, index));
  }

  // Where rows lie in DRAM now. A batch keeps the placement that it began with, and so keeps its memory. Any thread.
  std::shared_ptr<const Placement> placement() const {
    const std::lock_guard lock(placement_mutex_);
    return placement_;
  }
  void set_placement(std::shared_ptr<const Placement> placement) {
    const std::lock_guard lock(placement_mutex_);
    placement_.swap(placement);
  }

  // Begins a use of the layer's files by a batch or the loader; false where it is retired. Whoever got true calls
  // end_use. Sequentially consistent: either retire() sees the use, or the user sees that the layer is retired.
  bool begin_use() {
    uses_.fetch_add(1, std::memory_order_seq_cst);
    if (!retired_.load(std::memory_order_seq_cst)) return true;
    uses_.fetch_sub(1, std::memory_order_seq_cst);
    return false;
  }
  void end_use() { uses_.fetch_sub(1, std::memory_order_seq_cst); }
  void retire() { retired_.store(true, std::memory_order_seq_cst); }
  bool retired() const { return retired_.load(std::memory_order_seq_cst); }
  bool in_use() const { return uses_.load(std::memory_order_seq_cst) != 0; }
  // After retire(), once it is not in use.
  void close_files() { files_.clear(); }

  const std::uint32_t handle;
  const std::uint32_t layer;
  const std::uint64_t rows;
  const std::uint32_t row_bytes;
  const std::uint32_t value_bytes;
  const PageLayout layout;
  const RowSeed seed;

  engram_layer_policy policy;  // under the engine's lock on layers

  std::unique_ptr<LayerCounters[]> counters;  // one per worker
  std::atomic<std::uint64_t> background_reads{0};

 private:
  Layer(const engram_layer_options& options, std::uint32_t handle, std::uint32_t workers);

  std::uint32_t stripe_pages_;
  std::vector<UniqueFd> files_;
  mutable std::mutex placement_mutex_;
  std::shared_ptr<const Placement> placement_;  // under placement_mutex_
  std::atomic<std::uint32_t> uses_{0};
  std::atomic<bool> retired_{false};
};

}  // namespace engram

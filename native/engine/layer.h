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

#include "common/unique_fd.h"
#include "engine/counters.h"
#include "engine/resident_rows.h"
#include "engram/engine.h"
#include "pages/page_codec.h"

namespace engram {

class RowCache;

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
  std::uint32_t resident_layout() const {
    return value_bytes < row_bytes ? policy.row_layout : std::uint32_t{ENGRAM_LAYOUT_PACKED};
  }
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
  const engram_page_format format;
  const PageLayout layout;
  const RowSeed seed;

  engram_layer_policy policy;  // under the engine's lock on layers
  UniqueFd kept;               // memory of an earlier process that may hold the rows; under the same lock

  // How many maps of the resident rows clients hold: their memory stays until they let go. Raised under the same lock.
  std::atomic<std::uint32_t> maps{0};

  std::unique_ptr<LayerCounters[]> counters;  // one per worker, and one of the worker that serves at once
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

#include "engine/layer.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace engram {
namespace {

engram_page_format page_format(const engram_layer_options& options) {
  engram_page_format format{};
  std::memcpy(format.table_id, options.table_id, sizeof format.table_id);
  format.generation = options.generation;
  format.rows = options.rows;
  format.layer = options.layer;
  format.row_bytes = options.row_bytes;
  format.value_bytes = options.value_bytes;
  return format;
}

constexpr std::uint64_t kMaxRows = std::uint64_t{1} << 40;  // the cache's keys have 40 bits for the row
constexpr std::uint32_t kMaxFiles = 64;

// How long file number `file` of `files` must be.
std::uint64_t file_pages(std::uint64_t pages, std::uint64_t stripe_pages, std::uint32_t file, std::uint32_t files) {
  const std::uint64_t round = stripe_pages * files;
  const std::uint64_t rest = pages % round;
  const std::uint64_t begin = stripe_pages * file;
  return pages / round * stripe_pages + (rest > begin ? std::min(rest - begin, stripe_pages) : 0);
}

}  // namespace

ResidentRows::ResidentRows(std::uint64_t rows, const PageLayout& layout)
    : row_bytes_(layout.row_bytes),
      rows_per_page_(layout.rows_per_page),
      memory_(rows * layout.row_bytes),
      loaded_((rows / layout.rows_per_page + 64) / 64) {}

void ResidentRows::store_page(std::uint64_t page, const std::uint8_t* rows, std::uint32_t row_count) {
  const std::uint64_t bytes = std::uint64_t{row_count} * row_bytes_;
  std::memcpy(memory_.data() + page * rows_per_page_ * row_bytes_, rows, bytes);
  loaded_[page / 64].fetch_or(std::uint64_t{1} << (page % 64), std::memory_order_release);
  used_bytes_.store(used_bytes_.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}

Layer::Layer(const engram_layer_options& options, std::uint32_t handle_, std::uint32_t workers)
    : handle(handle_),
      layer(options.layer),
      rows(options.rows),
      row_bytes(options.row_bytes),
      value_bytes(options.value_bytes),
      layout(options.row_bytes),
      seed(make_row_seed(page_format(options))),
      policy(options.policy),
      counters(new LayerCounters[workers]),
      stripe_pages_(options.stripe_pages),
      placement_(std::make_shared<Placement>()) {}

bool Layer::is_valid(const engram_layer_policy& policy) {
  return policy.tier <= ENGRAM_POLICY_CACHED && policy.cache_share >= 0 && policy.cache_share <= 1;
}

std::unique_ptr<Layer> Layer::open(const engram_layer_options& options, std::uint32_t handle, std::uint32_t workers,
                                   std::string& error) {
  const std::string name = "layer " + std::to_string(options.layer);
  if (options.row_bytes < ENGRAM_MIN_ROW_BYTES || options.row_bytes > ENGRAM_MAX_ROW_BYTES) {
    error = name + ": row_bytes is " + std::to_string(options.row_bytes) + ", the format holds " +
            std::to_string(ENGRAM_MIN_ROW_BYTES) + " to " + std::to_string(ENGRAM_MAX_ROW_BYTES);
    return nullptr;
  }
  if (!is_valid(options.policy)) {
    error = name + ": its policy names no tier, or a share that is not from 0 to 1";
    return nullptr;
  }
  if (options.rows == 0 || options.rows >= kMaxRows || options.value_bytes == 0 ||
      options.value_bytes > options.row_bytes || options.stripe_pages == 0 || options.file_count == 0 ||
      options.file_count > kMaxFiles) {
    error = name + ": rows, value bytes, stripe or number of files is out of range";
    return nullptr;
  }
  std::unique_ptr<Layer> layer(new Layer(options, handle, workers));
  for (std::uint32_t file = 0; file < options.file_count; ++file) {
    UniqueFd descriptor(fcntl(options.files[file], F_DUPFD_CLOEXEC, 0));
    struct stat status {};
    if (!descriptor || fstat(descriptor.get(), &status) != 0) {
      error = name + ": data file " + std::to_string(file) + ": " + std::strerror(errno);
      return nullptr;
    }
    const std::uint64_t wanted =
        file_pages(layer->pages(), options.stripe_pages, file, options.file_count) * layer->layout.page_bytes;
    if (static_cast<std::uint64_t>(status.st_size) != wanted) {
      error = name + ": data file " + std::to_string(file) + " has " + std::to_string(status.st_size) + " bytes, " +
              std::to_string(options.rows) + " rows need " + std::to_string(wanted) + ": copy or pack the table again";
      return nullptr;
    }
    struct statx details {};
    if (statx(descriptor.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &details) == 0 &&
        (details.stx_mask & STATX_DIOALIGN) != 0 && details.stx_dio_offset_align > kPageUnitBytes) {
      error = name + ": the filesystem wants O_DIRECT reads aligned to " +
              std::to_string(details.stx_dio_offset_align) +
              " bytes, pages are aligned to 4096: put the table on a drive with blocks of at most 4096 bytes";
      return nullptr;
    }
    layer->files_.push_back(std::move(descriptor));
  }
  return layer;
}

}  // namespace engram

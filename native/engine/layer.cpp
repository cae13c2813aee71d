#include "engine/layer.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cache/row_key.h"

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

constexpr std::uint32_t kMaxFiles = 64;

// How long file number `file` of `files` must be.
std::uint64_t file_pages(std::uint64_t pages, std::uint64_t stripe_pages, std::uint32_t file, std::uint32_t files) {
  const std::uint64_t round = stripe_pages * files;
  const std::uint64_t rest = pages % round;
  const std::uint64_t begin = stripe_pages * file;
  return pages / round * stripe_pages + (rest > begin ? std::min(rest - begin, stripe_pages) : 0);
}

}  // namespace

Layer::Layer(const engram_layer_options& options, std::uint32_t handle_, std::uint32_t workers)
    : handle(handle_),
      layer(options.layer),
      rows(options.rows),
      row_bytes(options.row_bytes),
      value_bytes(options.value_bytes),
      format(page_format(options)),
      layout(options.row_bytes),
      seed(make_row_seed(format)),
      policy(options.policy),
      counters(new LayerCounters[workers]),
      stripe_pages_(options.stripe_pages),
      placement_(std::make_shared<Placement>()) {}

bool Layer::is_valid(const engram_layer_policy& policy) {
  return policy.tier <= ENGRAM_POLICY_CACHED && policy.row_layout <= ENGRAM_LAYOUT_SPLIT && policy.cache_share >= 0 &&
         policy.cache_share <= 1;
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
    error = name + ": its policy names no tier or layout, or a share that is not from 0 to 1";
    return nullptr;
  }
  if (options.rows == 0 || options.rows >= kMaxKeyRows || options.value_bytes == 0 ||
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
  if (options.kept_memory != nullptr) layer->kept = UniqueFd(fcntl(*options.kept_memory, F_DUPFD_CLOEXEC, 0));
  return layer;
}

}  // namespace engram

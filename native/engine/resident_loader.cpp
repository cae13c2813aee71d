#include "engine/resident_loader.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "common/masked_thread.h"
#include "io/fault_reader.h"
#include "io/page_reader.h"

namespace engram {
namespace {

constexpr std::uint64_t kReadBytes = 1u << 20;
constexpr int kNiceness = 10;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Reads all of it, with the workers' rules for what is tried again. False where it cannot be had.
bool read_fully(int file, std::uint8_t* buffer, std::uint64_t bytes, std::uint64_t offset) {
  PageRead read;
  read.bytes = static_cast<std::uint32_t>(bytes);
  while (true) {
    const ssize_t count =
        faulty_pread(file, buffer + read.done, read.bytes - read.done, static_cast<off_t>(offset + read.done));
    if (finish_or_continue(read, count < 0 ? -errno : count)) return read.result == 0;
  }
}

bool rows_ok(const Layer& layer, std::uint64_t page, const std::uint8_t* bytes) {
  const std::uint32_t rows = layer.rows_in_page(page);
  for (std::uint32_t row = 0; row < rows; ++row) {
    if (!layer.row_ok(bytes, page * layer.layout.rows_per_page + row, row)) return false;
  }
  return true;
}

}  // namespace

void ResidentLoader::start() {
  if (work_.empty()) return;
  thread_ = masked_thread([this] { run(); });
}

void ResidentLoader::stop() {
  stop_.store(true);
  if (thread_.joinable()) thread_.join();
}

void ResidentLoader::run() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
  for (const Work& work : work_) {
    if (stop_.load() || !work.layer->begin_use()) continue;
    load(*work.layer, *work.rows);
    work.layer->end_use();
  }
}

// Checks rows that an earlier process left against their digests; returns how many pages fail.
std::uint64_t ResidentLoader::take_over(const Layer& layer, ResidentRows& resident) {
  std::uint64_t bad_pages = 0;
  for (std::uint64_t page = 0; page < layer.pages() && !stop_.load() && !layer.retired(); ++page) {
    if (!resident.has_page(page) && !resident.take_over_page(page)) ++bad_pages;
  }
  return bad_pages;
}

void ResidentLoader::load(Layer& layer, ResidentRows& resident) {
  const PageLayout& layout = layer.layout;
  const std::uint64_t run_pages = std::max<std::uint64_t>(1, kReadBytes / layout.page_bytes);
  const std::unique_ptr<std::uint8_t, Free> buffer(
      static_cast<std::uint8_t*>(std::aligned_alloc(kPageUnitBytes, run_pages * layout.page_bytes)));
  std::uint64_t bad_pages = resident.is_taken_over() ? take_over(layer, resident) : 0;
  for (std::uint64_t first = 0;
       first < layer.pages() && !resident.is_taken_over() && !stop_.load() && !layer.retired();) {
    if (resident.has_page(first)) {  // an earlier loader's work
      ++first;
      continue;
    }
    // A run of pages that lie side by side in one file.
    const std::uint64_t to_stripe_end = layer.stripe_pages() - first % layer.stripe_pages();
    const std::uint64_t count = std::min({run_pages, layer.pages() - first, to_stripe_end});
    const Layer::Place place = layer.place(first);
    // Without memory for large reads nothing is loaded; requests go on being served from the drive.
    const bool arrived =
        buffer != nullptr && read_fully(place.file, buffer.get(), count * layout.page_bytes, place.offset);
    layer.background_reads.fetch_add(count, std::memory_order_relaxed);
    for (std::uint64_t page = first; page < first + count; ++page) {
      const std::uint64_t distance = (page - first) * layout.page_bytes;
      std::uint8_t* bytes = buffer.get() + distance;
      bool good = arrived && rows_ok(layer, page, bytes);
      if (!good && buffer != nullptr) {
        // Once more, by itself: one bad block fails the whole read, and what was wrong on the way is right now.
        good = read_fully(place.file, bytes, layout.page_bytes, place.offset + distance) && rows_ok(layer, page, bytes);
        layer.background_reads.fetch_add(1, std::memory_order_relaxed);
      }
      if (good) {
        resident.store_page(page, bytes);
      } else {
        ++bad_pages;
      }
    }
    first += count;
  }
  for (std::uint64_t piece = 0; !stop_.load() && !layer.retired() && resident.collapse_piece(piece); ++piece) continue;
  if (stop_.load() || layer.retired()) return;
  resident.finish(bad_pages == 0);
  engram_event event{};
  event.kind = ENGRAM_EVENT_RESIDENT;
  event.handle = layer.handle;
  event.row_id = static_cast<std::int64_t>(bad_pages);
  const std::string note = resident.is_taken_over() ? "taken over" : resident.kept_refusal();
  note.copy(event.text, sizeof event.text - 1);
  events_.push(event);
}

}  // namespace engram

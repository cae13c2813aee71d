#include "engine/resident_loader.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <memory>

#include "io/fault_reader.h"

namespace engram {
namespace {

constexpr std::uint64_t kReadBytes = 1u << 20;
constexpr int kNiceness = 10;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

constexpr int kMaxAttempts = 16;

// Reads all of it; 0 or an errno. Interrupted and refused reads are tried again.
int read_fully(int file, std::uint8_t* buffer, std::uint64_t bytes, std::uint64_t offset) {
  std::uint64_t done = 0;
  int attempts = 0;
  while (done < bytes) {
    const ssize_t count = faulty_pread(file, buffer + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && (errno == EINTR || errno == EAGAIN) && ++attempts < kMaxAttempts) continue;
    if (count < 0) return errno;
    if (count == 0) return EIO;
    done += static_cast<std::uint64_t>(count);
  }
  return 0;
}

}  // namespace

void ResidentLoader::start() {
  if (work_.empty()) return;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
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

void ResidentLoader::load(Layer& layer, ResidentRows& resident) {
  const PageLayout& layout = layer.layout;
  const std::uint64_t run_pages = std::max<std::uint64_t>(1, kReadBytes / layout.page_bytes);
  const std::unique_ptr<std::uint8_t, Free> buffer(
      static_cast<std::uint8_t*>(std::aligned_alloc(kPageUnitBytes, run_pages * layout.page_bytes)));
  std::uint64_t bad_pages = 0;
  for (std::uint64_t first = 0; first < layer.pages() && !stop_.load() && !layer.retired();) {
    if (resident.has_page(first)) {  // an earlier loader's work
      ++first;
      continue;
    }
    // A run of pages that lie side by side in one file.
    const std::uint64_t to_stripe_end = layer.stripe_pages() - first % layer.stripe_pages();
    const std::uint64_t count = std::min({run_pages, layer.pages() - first, to_stripe_end});
    const Layer::Place place = layer.place(first);
    // Without memory for large reads nothing is loaded; requests go on being served from the drive.
    const int failure =
        buffer == nullptr ? ENOMEM : read_fully(place.file, buffer.get(), count * layout.page_bytes, place.offset);
    layer.background_reads.fetch_add(count, std::memory_order_relaxed);
    for (std::uint64_t page = first; page < first + count; ++page) {
      std::uint8_t* bytes = buffer.get() + (page - first) * layout.page_bytes;
      const std::uint32_t rows = layer.rows_in_page(page);
      bool good = failure == 0;
      if (failure != 0 && buffer != nullptr) {
        // One bad block fails the whole read: the pages around it are good.
        good = read_fully(place.file, bytes, layout.page_bytes, place.offset + (page - first) * layout.page_bytes) == 0;
        layer.background_reads.fetch_add(1, std::memory_order_relaxed);
      }
      for (std::uint32_t row = 0; row < rows && good; ++row) {
        good = layer.row_ok(bytes, page * layout.rows_per_page + row, row);
      }
      if (good) {
        resident.store_page(page, bytes, rows);
      } else {
        ++bad_pages;
      }
    }
    first += count;
  }
  if (stop_.load() || layer.retired()) return;
  resident.finish(bad_pages == 0);
  engram_event event{};
  event.kind = ENGRAM_EVENT_RESIDENT;
  event.handle = layer.handle;
  event.row_id = static_cast<std::int64_t>(bad_pages);
  events_.push(event);
}

}  // namespace engram

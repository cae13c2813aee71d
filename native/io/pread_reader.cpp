// The pread reader: a pool of threads for machines where io_uring is forbidden (container runtimes' seccomp profiles,
// kernel.io_uring_disabled). The worker sleeps in epoll, on the doorbells and on one eventfd that the pool rings.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "io/page_reader.h"

namespace engram {
namespace {

constexpr std::uint32_t kMaxThreads = 32;

class PreadReader final : public PageReader {
 public:
  PreadReader() = default;
  ~PreadReader() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    if (epoll_ >= 0) close(epoll_);
    if (wake_descriptor_ >= 0) close(wake_descriptor_);
  }

  bool open(std::uint32_t depth, const PageBuffers& buffers, std::string& error) {
    buffers_ = &buffers;
    wake_descriptor_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    if (wake_descriptor_ < 0 || epoll_ < 0) {
      error = std::string("eventfd or epoll: ") + std::strerror(errno);
      return false;
    }
    watch(wake_descriptor_);
    try {
      for (std::uint32_t i = 0; i < std::min(depth, kMaxThreads); ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error& failure) {
      if (threads_.empty()) {
        error = std::string("cannot start a read thread: ") + failure.what();
        return false;
      }
    }
    return true;
  }

  void submit(PageRead* read) override { pending_.push_back(read); }

  void flush() override {
    if (pending_.empty()) return;
    {
      const std::lock_guard lock(mutex_);
      queue_.insert(queue_.end(), pending_.begin(), pending_.end());
    }
    if (pending_.size() == 1) {
      work_.notify_one();
    } else {
      work_.notify_all();
    }
    pending_.clear();
  }

  std::uint32_t reap(PageRead** reads, std::uint32_t capacity) override {
    const std::lock_guard lock(mutex_);
    const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(capacity, finished_.size()));
    for (std::uint32_t i = 0; i < count; ++i) {
      reads[i] = finished_.front();
      finished_.pop_front();
    }
    return count;
  }

  void wait(std::uint32_t completions, std::int64_t at_most_ns) override {
    flush();
    if (completions > 0) {
      const std::lock_guard lock(mutex_);
      if (!finished_.empty()) return;
    }
    epoll_event events[16];
    const timespec bound{static_cast<time_t>(at_most_ns / 1'000'000'000),
                         static_cast<long>(at_most_ns % 1'000'000'000)};
    int count = epoll_pwait2(epoll_, events, 16, at_most_ns < 0 ? nullptr : &bound, nullptr);
    // Kernels before 5.11 know milliseconds only.
    if (count < 0 && errno == ENOSYS) {
      count =
          epoll_wait(epoll_, events, 16, at_most_ns < 0 ? -1 : static_cast<int>((at_most_ns + 999'999) / 1'000'000));
    }
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd != wake_descriptor_) continue;
      std::uint64_t value;
      [[maybe_unused]] const ssize_t bytes = read(wake_descriptor_, &value, sizeof value);
    }
  }

  void watch(int doorbell) override {
    epoll_event event{};
    // Edge-triggered: each ring of the doorbell wakes once, though nobody ever reads it.
    event.events = EPOLLIN | EPOLLET;
    event.data.fd = doorbell;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, doorbell, &event);
  }
  void unwatch(int doorbell) override { epoll_ctl(epoll_, EPOLL_CTL_DEL, doorbell, nullptr); }

  void wake() override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_descriptor_, &one, sizeof one);
  }

  bool is_io_uring() const override { return false; }

 private:
  // A pool thread.
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      PageRead* page = queue_.front();
      queue_.pop_front();
      lock.unlock();
      std::uint8_t* buffer = buffers_->at(page->buffer);
      while (true) {
        const ssize_t bytes = pread(page->file, buffer + page->done, page->bytes - page->done,
                                    static_cast<off_t>(page->offset + page->done));
        if (finish_or_continue(*page, bytes < 0 ? -errno : bytes)) break;
      }
      lock.lock();
      finished_.push_back(page);
      if (finished_.size() == 1) wake();
    }
  }

  const PageBuffers* buffers_ = nullptr;
  int wake_descriptor_ = -1;
  int epoll_ = -1;
  std::vector<PageRead*> pending_;  // worker only
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<PageRead*> queue_;     // under mutex_
  std::deque<PageRead*> finished_;  // under mutex_
  bool stopping_ = false;           // under mutex_
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<PageReader> make_pread_reader(std::uint32_t depth, const PageBuffers& buffers, std::string& error) {
  auto reader = std::make_unique<PreadReader>();
  if (!reader->open(depth, buffers, error)) return nullptr;
  return reader;
}

}  // namespace engram

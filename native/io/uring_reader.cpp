// The io_uring reader. One ring, created and used by its worker thread only (SINGLE_ISSUER, DEFER_TASKRUN where the
// kernel has them), registered buffers where memlock allows, and multishot polls on the doorbells in the same ring, so
// that one call waits for reads and requests alike.
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/page_reader.h"

namespace engram {
namespace {

// user_data: a PageRead pointer, or (descriptor << 2 | mark). Pointers have their two low bits clear.
constexpr std::uint64_t kPollMark = 1;
constexpr std::uint64_t kIgnoreMark = 2;
constexpr std::uint64_t kMarkMask = 3;

class UringReader final : public PageReader {
 public:
  UringReader() = default;
  ~UringReader() override {
    if (ring_ready_) io_uring_queue_exit(&ring_);
    if (wake_descriptor_ >= 0) close(wake_descriptor_);
  }

  bool open(std::uint32_t depth, const PageBuffers& buffers, std::string& error) {
    buffers_ = &buffers;
    wake_descriptor_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_descriptor_ < 0) {
      error = std::string("eventfd: ") + std::strerror(errno);
      return false;
    }
    // From the best set of flags down to what every kernel with io_uring takes.
    const unsigned ladder[] = {
        IORING_SETUP_CQSIZE | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        IORING_SETUP_CQSIZE | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, IORING_SETUP_CQSIZE};
    int result = 0;
    for (const unsigned flags : ladder) {
      io_uring_params parameters{};
      parameters.flags = flags;
      parameters.cq_entries = std::max(4096u, depth * 4);
      result = io_uring_queue_init_params(std::max(256u, depth * 2), &ring_, &parameters);
      if (result != -EINVAL) break;
    }
    if (result < 0) {
      error = std::string("io_uring_setup: ") + std::strerror(-result);
      return false;
    }
    ring_ready_ = true;
    io_uring_ring_dontfork(&ring_);
    iovec whole{buffers.data(), buffers.total_bytes()};
    fixed_buffers_ = io_uring_register_buffers(&ring_, &whole, 1) == 0;
    watch(wake_descriptor_);
    flush();
    return true;
  }

  void submit(PageRead* read) override {
    io_uring_sqe* sqe = next_sqe();
    std::uint8_t* target = buffers_->at(read->buffer) + read->done;
    const unsigned bytes = read->bytes - read->done;
    if (fixed_buffers_) {
      io_uring_prep_read_fixed(sqe, read->file, target, bytes, read->offset + read->done, 0);
    } else {
      io_uring_prep_read(sqe, read->file, target, bytes, read->offset + read->done);
    }
    io_uring_sqe_set_data64(sqe, reinterpret_cast<std::uintptr_t>(read));
  }

  void flush() override {
    // -EBUSY and -EAGAIN: the completion queue must be emptied first; the entries stay queued and go with the next
    // call.
    if (io_uring_sq_ready(&ring_) > 0) io_uring_submit(&ring_);
  }

  std::uint32_t reap(PageRead** reads, std::uint32_t capacity) override {
    std::uint32_t count = 0;
    while (count < capacity) {
      io_uring_cqe* entries[64];
      const unsigned wanted = std::min<unsigned>(64, capacity - count);
      const unsigned got = io_uring_peek_batch_cqe(&ring_, entries, wanted);
      if (got == 0) break;
      for (unsigned i = 0; i < got; ++i) {
        PageRead* finished = handle(*entries[i]);
        if (finished != nullptr) reads[count++] = finished;
      }
      io_uring_cq_advance(&ring_, got);
    }
    // A worker with other work to do may not come here to sleep, which would send them, for long.
    if (std::exchange(again_, false)) flush();
    return count;
  }

  void wait(std::uint32_t completions, std::int64_t at_most_ns) override {
    if (!rearm_.empty()) {
      for (const int descriptor : std::exchange(rearm_, {})) {
        if (watched_.contains(descriptor)) arm(descriptor);
      }
    }
    if (completions <= 1 && at_most_ns < 0) {
      io_uring_submit_and_wait(&ring_, 1);
      return;
    }
    // A single doorbell does not end a wait for several completions, so such a wait ends by itself.
    std::int64_t bound_ns = completions <= 1 ? at_most_ns : 50'000;
    if (at_most_ns >= 0) bound_ns = std::min(bound_ns, at_most_ns);
    __kernel_timespec patience{bound_ns / 1'000'000'000, bound_ns % 1'000'000'000};
    io_uring_cqe* first = nullptr;
    io_uring_submit_and_wait_timeout(&ring_, &first, std::max(completions, 1u), &patience, nullptr);
  }

  void watch(int doorbell) override {
    watched_[doorbell] = true;
    arm(doorbell);
  }

  void unwatch(int doorbell) override {
    watched_.erase(doorbell);
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_poll_remove(sqe, poll_data(doorbell));
    io_uring_sqe_set_data64(sqe, kIgnoreMark);
    flush();
  }

  void wake() override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_descriptor_, &one, sizeof one);
  }

  bool is_io_uring() const override { return true; }

 private:
  static std::uint64_t poll_data(int descriptor) { return (static_cast<std::uint64_t>(descriptor) << 2) | kPollMark; }

  void arm(int descriptor) {
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_poll_multishot(sqe, descriptor, POLLIN);
    io_uring_sqe_set_data64(sqe, poll_data(descriptor));
  }

  io_uring_sqe* next_sqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }

  // A finished read, or nullptr where the completion was something else.
  PageRead* handle(const io_uring_cqe& cqe) {
    const std::uint64_t data = cqe.user_data;
    if ((data & kMarkMask) == kPollMark) {
      const int descriptor = static_cast<int>(data >> 2);
      // A multishot poll ends by itself (queue overflow, error): arm it again before the next sleep.
      if ((cqe.flags & IORING_CQE_F_MORE) == 0 && cqe.res != -ECANCELED) rearm_.push_back(descriptor);
      // The wake eventfd is the daemon's own: read it so that it never saturates.
      if (descriptor == wake_descriptor_) {
        std::uint64_t count;
        [[maybe_unused]] const ssize_t bytes = read(wake_descriptor_, &count, sizeof count);
      }
      return nullptr;
    }
    if ((data & kMarkMask) != 0) return nullptr;
    auto* page = reinterpret_cast<PageRead*>(static_cast<std::uintptr_t>(data));
    if (finish_or_continue(*page, cqe.res)) return page;
    submit(page);
    again_ = true;
    return nullptr;
  }

  io_uring ring_{};
  bool ring_ready_ = false;
  bool fixed_buffers_ = false;
  const PageBuffers* buffers_ = nullptr;
  int wake_descriptor_ = -1;
  std::unordered_map<int, bool> watched_;
  std::vector<int> rearm_;
  bool again_ = false;  // reads that were cut short or refused are queued once more
};

}  // namespace

std::unique_ptr<PageReader> make_uring_reader(std::uint32_t depth, const PageBuffers& buffers, std::string& error) {
  auto reader = std::make_unique<UringReader>();
  if (!reader->open(depth, buffers, error)) return nullptr;
  return reader;
}

}  // namespace engram

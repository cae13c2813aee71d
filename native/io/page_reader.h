// How a worker reads pages: submissions and completions, and the place where it sleeps. Two implementations:
// io_uring (uring_reader.h), and a pool of pread threads (pread_reader.h) where io_uring is not to be had.
//
// A reader belongs to one worker thread: create, use and destroy it there (wake() alone may be called from anywhere).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace engram {

// One page on its way. The worker owns the memory; between submit and its completion the reader may use it.
struct PageRead {
  int file = -1;             // descriptor
  std::uint64_t offset = 0;  // bytes
  std::uint32_t bytes = 0;
  std::uint32_t buffer = 0;  // number of the page buffer
  std::uint32_t done = 0;    // bytes that have arrived (after a short read)
  std::int32_t result = 0;   // after completion: 0, or -errno
  std::uint32_t attempts = 0;
};

// Page buffers of one worker: `count` times `bytes`, aligned to 4096.
class PageBuffers {
 public:
  PageBuffers(std::uint32_t count, std::uint32_t bytes);
  ~PageBuffers();
  PageBuffers(const PageBuffers&) = delete;
  PageBuffers& operator=(const PageBuffers&) = delete;

  bool valid() const { return memory_ != nullptr; }
  std::uint8_t* at(std::uint32_t buffer) const { return memory_ + std::uint64_t{buffer} * bytes_; }
  std::uint8_t* data() const { return memory_; }
  std::uint64_t total_bytes() const { return std::uint64_t{count_} * bytes_; }

 private:
  std::uint8_t* memory_ = nullptr;
  std::uint32_t count_;
  std::uint32_t bytes_;
};

class PageReader {
 public:
  virtual ~PageReader() = default;

  // Queues a read; its completion comes out of reap(). Never blocks for the read itself. At most the depth given at
  // creation.
  virtual void submit(PageRead* read) = 0;
  // Hands queued reads to the kernel.
  virtual void flush() = 0;
  // Takes up to capacity completed reads; does not block.
  virtual std::uint32_t reap(PageRead** reads, std::uint32_t capacity) = 0;
  // Sleeps until about `completions` reads are done, or a doorbell or wake() rings; 0 = a doorbell or wake() only. It
  // may return early. at_most_ns bounds the sleep; -1 = no bound.
  virtual void wait(std::uint32_t completions, std::int64_t at_most_ns) = 0;

  // Watches a session's doorbell eventfd. Never reads from it (docs/protocol.md).
  virtual void watch(int doorbell) = 0;
  virtual void unwatch(int doorbell) = 0;
  // Ends a wait(), now or the next one. Any thread.
  virtual void wake() = 0;

  virtual bool is_io_uring() const = 0;
};

// depth: reads in flight at most. Reads go to `buffers`. On failure nullptr, and `error` says why.
std::unique_ptr<PageReader> make_uring_reader(std::uint32_t depth, const PageBuffers& buffers, std::string& error);
std::unique_ptr<PageReader> make_pread_reader(std::uint32_t depth, const PageBuffers& buffers, std::string& error);

// What becomes of a read that returned `result` bytes (or -errno): true = it is finished (read.result is set), false =
// the rest of it, or all of it again, must be submitted. Interrupted and refused reads are tried again a few times; a
// short read goes on where it stopped; the end of the file before the page's end is EIO.
bool finish_or_continue(PageRead& read, std::int64_t result);

}  // namespace engram

#include "io/page_reader.h"

#include <cerrno>
#include <cstdlib>

namespace engram {
namespace {

constexpr std::uint32_t kMaxAttempts = 16;
constexpr std::size_t kBufferAlignment = 4096;

}  // namespace

PageBuffers::PageBuffers(std::uint32_t count, std::uint32_t bytes) : count_(count), bytes_(bytes) {
  memory_ = static_cast<std::uint8_t*>(std::aligned_alloc(kBufferAlignment, std::size_t{count} * bytes));
}

PageBuffers::~PageBuffers() {
  std::free(memory_);
}

bool finish_or_continue(PageRead& read, std::int64_t result) {
  if (result == -EINTR || result == -EAGAIN) {
    if (++read.attempts < kMaxAttempts) return false;
    read.result = static_cast<std::int32_t>(result);
    return true;
  }
  if (result < 0) {
    read.result = static_cast<std::int32_t>(result);
    return true;
  }
  read.done += static_cast<std::uint32_t>(result);
  if (read.done >= read.bytes) {
    read.result = 0;
    return true;
  }
  // The end of the file, or a rest that O_DIRECT cannot ask for.
  if (result == 0 || read.done % 512 != 0 || ++read.attempts >= kMaxAttempts) {
    read.result = -EIO;
    return true;
  }
  return false;
}

}  // namespace engram

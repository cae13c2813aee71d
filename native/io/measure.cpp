// A bare read loop, for the drive's own figures: no cache, no checksum, a fixed number of reads in flight.
#include "engram/measure.h"

#include <liburing.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <vector>

#include "common/splitmix64.h"

namespace {

using engram::Splitmix64;

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::size_t kLatencies = 65'536;  // of the latest reads

int run(io_uring& ring, std::uint8_t* buffers, int file, std::uint64_t pages, std::uint32_t depth,
        std::chrono::milliseconds duration, Splitmix64 places, engram_read_rate* rate) {
  using Clock = std::chrono::steady_clock;
  std::vector<Clock::time_point> started(depth);
  std::vector<float> latencies_us(kLatencies);
  auto now = Clock::now();
  const auto submit = [&](std::uint64_t buffer) {
    started[buffer] = now;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring);
    io_uring_prep_read(sqe, file, buffers + buffer * kPageBytes, kPageBytes, places.below(pages) * kPageBytes);
    io_uring_sqe_set_data64(sqe, buffer);
  };
  for (std::uint32_t buffer = 0; buffer < depth; ++buffer) submit(buffer);
  const auto began = now;
  std::uint32_t in_flight = depth;
  std::uint64_t reads = 0;
  int failure = 0;
  while (in_flight > 0) {
    const int entered = io_uring_submit_and_wait(&ring, 1);
    if (entered < 0 && entered != -EINTR && entered != -EAGAIN && entered != -EBUSY) return -entered;
    now = Clock::now();
    const bool is_over = failure != 0 || now - began >= duration;
    unsigned seen = 0;
    unsigned head = 0;
    io_uring_cqe* completion = nullptr;
    io_uring_for_each_cqe(&ring, head, completion) {
      ++seen;
      if (completion->res < 0 && completion->res != -EINTR && completion->res != -EAGAIN) failure = -completion->res;
      const std::uint64_t buffer = io_uring_cqe_get_data64(completion);
      if (completion->res > 0) {
        latencies_us[reads % kLatencies] = std::chrono::duration<float, std::micro>(now - started[buffer]).count();
        ++reads;
      }
      if (is_over) {
        --in_flight;
      } else {
        submit(buffer);
      }
    }
    io_uring_cq_advance(&ring, seen);
  }
  const double seconds = std::chrono::duration<double>(now - began).count();
  double p99_us = 0;
  if (reads != 0) {
    latencies_us.resize(std::min<std::size_t>(reads, kLatencies));
    const auto p99 = latencies_us.begin() + static_cast<std::ptrdiff_t>(latencies_us.size() * 99 / 100);
    std::nth_element(latencies_us.begin(), p99, latencies_us.end());
    p99_us = *p99;
  }
  *rate = {reads, seconds, reads == 0 ? 0 : seconds * 1e6 * depth / static_cast<double>(reads), p99_us};
  return failure;
}

}  // namespace

extern "C" int engram_measure_reads(int file, uint64_t file_bytes, uint32_t depth, uint32_t duration_ms, uint64_t seed,
                                    engram_read_rate* rate) {
  const std::uint64_t pages = file_bytes / kPageBytes;
  if (pages == 0 || depth == 0 || depth > ENGRAM_MEASURE_MAX_DEPTH) return EINVAL;
  io_uring ring;
  const int result = io_uring_queue_init(depth, &ring, 0);
  if (result < 0) return -result;
  void* buffers =
      mmap(nullptr, depth * kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  int status = ENOMEM;
  if (buffers != MAP_FAILED) {
    try {
      status = run(ring, static_cast<std::uint8_t*>(buffers), file, pages, depth,
                   std::chrono::milliseconds(duration_ms), Splitmix64(seed), rate);
    } catch (const std::bad_alloc&) {
      // Nothing is in flight yet: the memory is taken before the first read.
    }
  }
  // Reads that an error left in flight hold their pages themselves until they have landed.
  io_uring_queue_exit(&ring);
  if (buffers != MAP_FAILED) munmap(buffers, depth * kPageBytes);
  return status;
}

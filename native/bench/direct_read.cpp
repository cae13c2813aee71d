// The plain peer for cold rows: one io_uring, O_DIRECT, a fixed number of reads in flight, no cache, no checksum.
#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "engram/bench.h"

namespace {

constexpr std::uint32_t kPageBytes = 4096;

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

double engram_bench_direct_read(const char* path, const int64_t* ids, uint64_t count, uint32_t rows_per_page,
                                uint32_t row_bytes, uint32_t depth, uint8_t* out, int* error_number) {
  *error_number = EINVAL;
  if (depth == 0 || depth > 4096 || rows_per_page == 0 || row_bytes * rows_per_page > kPageBytes) return -1;
  const int descriptor = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (descriptor < 0) {
    *error_number = errno;
    return -1;
  }
  io_uring ring;
  if (const int result = io_uring_queue_init(depth, &ring, 0); result < 0) {
    *error_number = -result;
    close(descriptor);
    return -1;
  }
  const std::unique_ptr<void, Freed> memory(std::aligned_alloc(kPageBytes, std::size_t{depth} * kPageBytes));
  auto* buffers = static_cast<std::uint8_t*>(memory.get());
  std::vector<std::uint64_t> position(depth);
  std::vector<std::uint32_t> free_buffers(depth);
  for (std::uint32_t i = 0; i < depth; ++i) free_buffers[i] = i;
  bool failed = buffers == nullptr;
  std::uint64_t next = 0;
  std::uint64_t done = 0;
  const auto start = std::chrono::steady_clock::now();
  while (done < count && !failed) {
    while (next < count && !free_buffers.empty()) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring);
      if (sqe == nullptr) break;
      const std::uint32_t buffer = free_buffers.back();
      free_buffers.pop_back();
      position[buffer] = next;
      const std::uint64_t offset = static_cast<std::uint64_t>(ids[next]) / rows_per_page * kPageBytes;
      io_uring_prep_read(sqe, descriptor, buffers + std::size_t{buffer} * kPageBytes, kPageBytes, offset);
      io_uring_sqe_set_data64(sqe, buffer);
      ++next;
    }
    io_uring_submit_and_wait(&ring, 1);
    io_uring_cqe* entries[64];
    const unsigned got = io_uring_peek_batch_cqe(&ring, entries, 64);
    for (unsigned i = 0; i < got; ++i) {
      const auto buffer = static_cast<std::uint32_t>(entries[i]->user_data);
      if (entries[i]->res != static_cast<int>(kPageBytes)) {
        failed = true;
        *error_number = entries[i]->res < 0 ? -entries[i]->res : EIO;
      }
      const std::uint64_t row = static_cast<std::uint64_t>(ids[position[buffer]]) % rows_per_page;
      std::memcpy(out + position[buffer] * row_bytes, buffers + std::size_t{buffer} * kPageBytes + row * row_bytes,
                  row_bytes);
      free_buffers.push_back(buffer);
    }
    io_uring_cq_advance(&ring, got);
    done += got;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  io_uring_queue_exit(&ring);  // waits for reads in flight before their buffers go
  close(descriptor);
  return failed ? -1 : elapsed.count();
}

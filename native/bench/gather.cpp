// The limit of a DRAM gather: rows copied from huge pages to a populated memfd by the loop that the engine uses, with
// no daemon, no ring and no look-up around it.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "common/huge_memory.h"
#include "engine/copy_row.h"
#include "engram/bench.h"

using engram::Destination;
using engram::HugeMemory;

struct engram_bench_gather {
  ~engram_bench_gather() {
    if (reply != nullptr) munmap(reply, reply_bytes);
  }
  std::uint64_t row_count = 0;
  std::uint32_t row_bytes = 0;
  std::uint32_t threads = 1;
  HugeMemory rows;
  std::uint8_t* reply = nullptr;
  std::uint64_t reply_bytes = 0;
};

namespace {

constexpr std::uint64_t kBlockRows = 512;

std::uint8_t* map_reply(std::uint64_t bytes) {
  const int descriptor = memfd_create("engram-bench", MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  }
  close(descriptor);
  return memory == MAP_FAILED ? nullptr : static_cast<std::uint8_t*>(memory);
}

bool in_range(const engram_bench_gather& gather, const std::int64_t* ids, std::uint64_t batch_rows,
              std::uint64_t batches) {
  return batch_rows != 0 && batch_rows * gather.row_bytes <= gather.reply_bytes &&
         std::all_of(ids, ids + batch_rows * batches,
                     [&](std::int64_t id) { return id >= 0 && static_cast<std::uint64_t>(id) < gather.row_count; });
}

void copy_share(const engram_bench_gather& gather, engram::RowCopier copier, const std::int64_t* ids,
                std::uint64_t begin, std::uint64_t end) {
  const Destination destination{gather.reply, nullptr, gather.row_bytes, 0};
  const std::uint8_t* sources[kBlockRows];
  for (std::uint64_t first = begin; first < end; first += kBlockRows) {
    const auto count = static_cast<std::uint32_t>(std::min(kBlockRows, end - first));
    for (std::uint32_t i = 0; i < count; ++i) {
      sources[i] = gather.rows.data() + static_cast<std::uint64_t>(ids[first + i]) * gather.row_bytes;
    }
    copier(sources, count, destination, first);
  }
}

}  // namespace

engram_bench_gather* engram_bench_gather_create(uint64_t rows, uint32_t row_bytes, uint64_t reply_rows,
                                                uint32_t threads) {
  auto* gather = new (std::nothrow) engram_bench_gather;
  if (gather == nullptr || rows == 0 || row_bytes == 0 || reply_rows == 0 || threads < 1 || threads > 2) {
    delete gather;
    return nullptr;
  }
  gather->row_count = rows;
  gather->row_bytes = row_bytes;
  gather->threads = threads;
  gather->rows = HugeMemory(rows * row_bytes);
  gather->reply_bytes = reply_rows * row_bytes;
  gather->reply = map_reply(gather->reply_bytes);
  if (!gather->rows.valid() || gather->reply == nullptr) {
    delete gather;
    return nullptr;
  }
  for (std::uint64_t i = 0; i < rows * row_bytes; i += 8) {
    const std::uint64_t word = i * 0x9E3779B97F4A7C15;
    std::memcpy(gather->rows.data() + i, &word, std::min<std::uint64_t>(8, rows * row_bytes - i));
  }
  return gather;
}

double engram_bench_gather_run(engram_bench_gather* gather, const int64_t* ids, uint64_t batch_rows, uint64_t batches) {
  if (!in_range(*gather, ids, batch_rows, batches)) return -1;
  const engram::RowCopier copier = engram::choose_copiers(gather->row_bytes, 0).rows;
  const std::uint64_t cut = batch_rows / gather->threads;
  std::atomic<std::uint64_t> begun{0};
  std::atomic<std::uint64_t> ended{0};
  std::atomic<bool> ready{false};
  const auto wait_for = [](const std::atomic<std::uint64_t>& word, std::uint64_t value) {
    for (std::uint32_t spins = 0; word.load(std::memory_order_acquire) < value; ++spins) {
      if (spins % 16 == 15) std::this_thread::yield();
    }
  };
  std::thread helper;
  if (gather->threads == 2) {
    helper = std::thread([&] {
      ready.store(true, std::memory_order_release);
      for (std::uint64_t batch = 0; batch < batches; ++batch) {
        wait_for(begun, batch + 1);
        copy_share(*gather, copier, ids + batch * batch_rows, cut, batch_rows);
        ended.store(batch + 1, std::memory_order_release);
      }
    });
    while (!ready.load(std::memory_order_acquire)) std::this_thread::yield();
  }
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t batch = 0; batch < batches; ++batch) {
    begun.store(batch + 1, std::memory_order_release);
    copy_share(*gather, copier, ids + batch * batch_rows, 0, gather->threads == 2 ? cut : batch_rows);
    if (gather->threads == 2) wait_for(ended, batch + 1);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (helper.joinable()) helper.join();
  return elapsed.count();
}

double engram_bench_gather_run_plain(engram_bench_gather* gather, const int64_t* ids, uint64_t batch_rows,
                                     uint64_t batches) {
  if (!in_range(*gather, ids, batch_rows, batches)) return -1;
  const std::uint64_t row_bytes = gather->row_bytes;
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t batch = 0; batch < batches; ++batch) {
    for (std::uint64_t i = 0; i < batch_rows; ++i) {
      const auto row = static_cast<std::uint64_t>(ids[batch * batch_rows + i]);
      std::memcpy(gather->reply + i * row_bytes, gather->rows.data() + row * row_bytes, row_bytes);
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double engram_bench_gather_run_split(engram_bench_gather* gather, uint32_t value_bytes, const int64_t* ids,
                                     uint64_t batch_rows, uint64_t batches) {
  if (value_bytes > gather->row_bytes || !in_range(*gather, ids, batch_rows, batches)) return -1;
  const std::uint32_t scale_bytes = gather->row_bytes - value_bytes;
  const engram::PartCopier copier = engram::choose_part_copier(value_bytes, scale_bytes);
  const std::uint8_t* values = gather->rows.data();
  const engram::PartSources sources{values, values + gather->row_count * value_bytes, value_bytes, scale_bytes};
  const Destination destination{gather->reply, nullptr, gather->row_bytes, 0};
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t batch = 0; batch < batches; ++batch) {
    for (std::uint64_t first = 0; first < batch_rows; first += kBlockRows) {
      const auto count = static_cast<std::uint32_t>(std::min(kBlockRows, batch_rows - first));
      copier(sources, ids + batch * batch_rows + first, count, destination, first);
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

uint8_t* engram_bench_gather_rows(engram_bench_gather* gather) {
  return gather->rows.data();
}

void engram_bench_gather_destroy(engram_bench_gather* gather) {
  delete gather;
}

// A reader that injects faults between the worker and the real reader; fault_plan.h says which.
//
// Reads that are to fail never reach the drive; reads that are to deliver something wrong do, from the wrong place, or
// with their bytes changed afterwards. Retries go the way that they go in an ordinary build: through
// finish_or_continue.
#include "io/fault_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/splitmix64.h"
#include "faults/fault_plan.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::uint32_t kBlock = 512;  // what O_DIRECT cuts reads at
constexpr useconds_t kHoldUs = 200;

void flip_bits(std::uint8_t* bytes, std::size_t count, Splitmix64& random) {
  for (std::size_t begin = 0; begin < count; begin += 64) {
    const std::size_t place = begin + random.below(std::min<std::size_t>(64, count - begin));
    bytes[place] ^= static_cast<std::uint8_t>(1u << random.below(8));
  }
}

class FaultReader final : public PageReader {
 public:
  FaultReader(std::unique_ptr<PageReader> inner, const PageBuffers& buffers)
      : inner_(std::move(inner)), buffers_(buffers), random_(faults().plan().seed + faults().next_stream()) {}
  ~FaultReader() override {
    inner_.reset();
    if (stale_ >= 0) close(stale_);
  }

  void submit(PageRead* read) override {
    const FaultPlan plan = faults().plan();
    if (std::find(files_.begin(), files_.end(), read->file) == files_.end()) files_.push_back(read->file);
    Flight flight{read->file, read->offset, read->bytes, kKinds, 0};
    const std::uint64_t number = faults().next_read();
    FaultKind kind = choose(plan);
    if (number == plan.eio_at) kind = kEio;
    const auto decided = after_wrong_.find({read->file, read->offset});
    if (decided != after_wrong_.end()) {
      kind = decided->second;
      after_wrong_.erase(decided);
    } else if (is_wrong(kind)) {
      after_wrong_[{read->file, read->offset}] = random_.unit() < plan.lasting ? kind : kKinds;
    }
    switch (kind) {
      case kShort:
        if (read->bytes <= kBlock) break;
        read->bytes = kBlock * static_cast<std::uint32_t>(1 + random_.below(read->bytes / kBlock - 1));
        flight.kind = kind;
        break;
      case kMisdirected: {
        struct stat status {};
        const bool known = fstat(read->file, &status) == 0;
        const std::uint64_t pages = known ? static_cast<std::uint64_t>(status.st_size) / read->bytes : 0;
        if (pages < 2) break;
        const std::uint64_t page = read->offset / read->bytes;
        read->offset = (page + 1 + random_.below(pages - 1)) % pages * read->bytes;
        flight.kind = kind;
        break;
      }
      case kLayer:
        if (swap_file(*read, another_file(read->file))) flight.kind = kind;
        break;
      case kStale:
        if (stale_ < 0) stale_ = open(plan.stale_file.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
        if (swap_file(*read, stale_)) flight.kind = kind;
        break;
      case kSlow:
        flight.release_ns = monotonic_ns() + static_cast<std::int64_t>(plan.slow_ms) * 1'000'000;
        flight.kind = kind;
        break;
      default:
        flight.kind = kind;
    }
    if (flight.kind != kKinds) faults().count(flight.kind);
    flights_[read] = flight;
    if (kind == kEintr || kind == kEagain || kind == kEio) {
      refused_.push_back(read);
    } else {
      inner_->submit(read);
    }
  }

  void flush() override { inner_->flush(); }

  std::uint32_t reap(PageRead** reads, std::uint32_t capacity) override {
    std::uint32_t count = 0;
    std::vector<PageRead*> refused;
    refused.swap(refused_);
    for (PageRead* read : refused) {
      const FaultKind kind = flights_[read].kind;
      const int number = kind == kEintr ? EINTR : kind == kEagain ? EAGAIN : EIO;
      if (!finish_or_continue(*read, -number)) {
        flights_.erase(read);
        inner_->submit(read);
        inner_->flush();
      } else if (count < capacity) {
        flights_.erase(read);
        reads[count++] = read;
      } else {
        // Asked for fewer than there are: said again with the next call, which finishes it in the same way.
        refused_.push_back(read);
      }
    }
    const std::uint32_t arrived = inner_->reap(reads + count, capacity - count);
    const std::uint32_t begin = count;
    for (std::uint32_t i = begin; i < begin + arrived; ++i) {
      PageRead* read = reads[i];
      if (arrive(*read)) reads[count++] = read;
    }
    const std::int64_t now = monotonic_ns();
    while (count < capacity) {
      const auto due = std::find_if(held_.begin(), held_.end(), [&](const Held& held) { return held.at_ns <= now; });
      if (due == held_.end()) break;
      reads[count++] = due->read;
      held_.erase(due);
    }
    return count;
  }

  void wait(std::uint32_t completions, std::int64_t at_most_ns) override {
    if (!refused_.empty()) return;
    if (!held_.empty()) {
      inner_->flush();
      usleep(kHoldUs);
      return;
    }
    inner_->wait(completions, at_most_ns);
  }

  void watch(int doorbell) override { inner_->watch(doorbell); }
  void unwatch(int doorbell) override { inner_->unwatch(doorbell); }
  void wake() override { inner_->wake(); }
  bool is_io_uring() const override { return inner_->is_io_uring(); }

 private:
  struct Flight {
    int file;
    std::uint64_t offset;
    std::uint32_t bytes;
    FaultKind kind;
    std::int64_t release_ns;
  };
  struct Held {
    PageRead* read;
    std::int64_t at_ns;
  };

  FaultKind choose(const FaultPlan& plan) {
    double rest = random_.unit();
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      rest -= plan.rates[kind];
      if (rest < 0) return static_cast<FaultKind>(kind);
    }
    return kKinds;
  }

  int another_file(int file) {
    for (const int candidate : files_) {
      if (candidate != file) return candidate;
    }
    return -1;
  }

  static bool swap_file(PageRead& read, int file) {
    struct stat status {};
    if (file < 0 || fstat(file, &status) != 0) return false;
    if (read.offset + read.bytes > static_cast<std::uint64_t>(status.st_size)) return false;
    read.file = file;
    return true;
  }

  // A read has come from the real reader: true where the worker gets it now.
  bool arrive(PageRead& read) {
    const auto found = flights_.find(&read);
    if (found == flights_.end()) return true;  // a second try, left in peace
    const Flight flight = found->second;
    flights_.erase(found);
    const std::uint32_t arrived = read.done;
    read.file = flight.file;
    read.offset = flight.offset;
    read.bytes = flight.bytes;
    if (read.result != 0) return true;
    std::uint8_t* bytes = buffers_.at(read.buffer);
    switch (flight.kind) {
      case kShort:
        read.done = 0;
        if (finish_or_continue(read, arrived)) return true;
        inner_->submit(&read);
        inner_->flush();
        return false;
      case kFlip:
        flip_bits(bytes, read.bytes, random_);
        return true;
      case kTorn:
        // The half that was not written still has another page's bytes.
        for (std::uint32_t i = read.bytes / 2; i < read.bytes; ++i)
          bytes[i] = static_cast<std::uint8_t>(random_.next());
        return true;
      case kSlow:
        held_.push_back({&read, flight.release_ns});
        return false;
      default:
        return true;
    }
  }

  std::unique_ptr<PageReader> inner_;
  const PageBuffers& buffers_;
  Splitmix64 random_;
  std::unordered_map<PageRead*, Flight> flights_;
  std::map<std::pair<int, std::uint64_t>, FaultKind> after_wrong_;  // by file and offset: what the next read is to be
  std::vector<PageRead*> refused_;                                  // never sent
  std::vector<Held> held_;
  std::vector<int> files_;
  int stale_ = -1;
};

}  // namespace

bool prepare_faults(std::string& error) {
  return faults().prepare(error);
}

std::unique_ptr<PageReader> with_faults(std::unique_ptr<PageReader> reader, const PageBuffers& buffers) {
  return std::make_unique<FaultReader>(std::move(reader), buffers);
}

ssize_t faulty_pread(int file, void* buffer, std::size_t bytes, off_t offset) {
  static std::mutex mutex;
  static Splitmix64 random(faults().plan().seed);
  const FaultPlan plan = faults().plan();
  const std::lock_guard lock(mutex);
  const std::uint64_t number = faults().next_read();
  const auto hit = [&](FaultKind kind) {
    if (random.unit() >= plan.rates[kind]) return false;
    faults().count(kind);
    return true;
  };
  const auto refuse = [](int error_number) {
    errno = error_number;
    return ssize_t{-1};
  };
  if (hit(kEintr)) return refuse(EINTR);
  if (hit(kEagain)) return refuse(EAGAIN);
  if (number == plan.eio_at) faults().count(kEio);
  if (number == plan.eio_at || hit(kEio)) return refuse(EIO);
  if (bytes > kBlock && hit(kShort)) bytes = kBlock * (1 + random.below(bytes / kBlock - 1));
  const ssize_t count = pread(file, buffer, bytes, offset);
  if (count > 0 && hit(kFlip)) flip_bits(static_cast<std::uint8_t*>(buffer), static_cast<std::size_t>(count), random);
  return count;
}

std::string fault_report() {
  return faults().report();
}

}  // namespace engram

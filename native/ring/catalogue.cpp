#include "ring/catalogue.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "engram/pages.h"
#include "ring/error.h"

namespace engram {
namespace {

int malformed(engram_error* error, const char* what) {
  return fail(error, ENGRAM_CLIENT_PROTOCOL, 0, "the daemon's catalogue is malformed: %s", what);
}

const char* record_fault(const engram_catalogue_record& record) {
  if (std::memchr(record.name, 0, sizeof record.name) == nullptr) return "a table name has no end";
  if (record.row_bytes == 0 || record.row_bytes > ENGRAM_MAX_ROW_BYTES) return "row_bytes is out of range";
  if (record.value_bytes == 0 || record.value_bytes > record.row_bytes) return "value_bytes is out of range";
  if (record.rows > INT64_MAX) return "rows is out of range";
  return nullptr;
}

}  // namespace

int Catalogue::read(int fd, uint64_t bytes, Catalogue& catalogue, engram_error* error) {
  if (bytes < sizeof(engram_catalogue) || bytes > kMaxBytes) return malformed(error, "its size is out of range");
  // Read, not mapped: a private copy cannot change or shrink under the parser.
  std::vector<std::byte> copy(bytes);
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::pread(fd, copy.data() + done, bytes - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail(error, ENGRAM_CLIENT_SYSTEM, errno, "cannot read the daemon's catalogue: %m");
    if (got == 0) return malformed(error, "it is shorter than announced");
    done += static_cast<uint64_t>(got);
  }
  return parse(copy, catalogue, error);
}

int Catalogue::parse(std::span<const std::byte> bytes, Catalogue& catalogue, engram_error* error) {
  engram_catalogue head;
  if (bytes.size() < sizeof head) return malformed(error, "it is shorter than its head");
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.magic != ENGRAM_CATALOGUE_MAGIC) return malformed(error, "the magic number is wrong");
  if (head.version != ENGRAM_PROTOCOL_VERSION) return malformed(error, "its version is not 1");
  if (head.record_bytes != sizeof(engram_catalogue_record)) return malformed(error, "record_bytes is wrong");
  if (head.bytes > bytes.size()) return malformed(error, "it is shorter than it says");
  if (head.record_count > (bytes.size() - sizeof head) / sizeof(engram_catalogue_record)) {
    return malformed(error, "its records do not fit");
  }
  Catalogue parsed;
  parsed.records_.resize(head.record_count);
  parsed.head_sizes_.resize(head.record_count);
  if (head.record_count > 0) {
    std::memcpy(parsed.records_.data(), bytes.data() + sizeof head,
                head.record_count * sizeof(engram_catalogue_record));
  }
  // Many records could name the same head sizes, so their sum is limited too.
  uint64_t head_sizes_left = bytes.size() / sizeof(int64_t);
  for (uint32_t i = 0; i < head.record_count; ++i) {
    const engram_catalogue_record& record = parsed.records_[i];
    if (const char* fault = record_fault(record)) return malformed(error, fault);
    if (record.head_count > head_sizes_left) return malformed(error, "head_count is out of range");
    head_sizes_left -= record.head_count;
    const uint64_t size = uint64_t{record.head_count} * sizeof(int64_t);
    if (record.head_sizes_offset > bytes.size() || bytes.size() - record.head_sizes_offset < size) {
      return malformed(error, "head sizes lie outside");
    }
    parsed.head_sizes_[i].resize(record.head_count);
    if (size > 0) std::memcpy(parsed.head_sizes_[i].data(), bytes.data() + record.head_sizes_offset, size);
  }
  catalogue = std::move(parsed);
  return 0;
}

const std::vector<int64_t>* Catalogue::head_sizes(uint32_t handle) const {
  for (std::size_t i = 0; i < records_.size(); ++i) {
    if (records_[i].handle == handle) return &head_sizes_[i];
  }
  return nullptr;
}

}  // namespace engram

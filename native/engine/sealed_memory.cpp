#include "engine/sealed_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstring>

#include "common/machine_page.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace engram {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr unsigned kHugePageFlag = 21u << 26;  // 2^21 bytes, whatever the kernel's default is (MFD_HUGE_SHIFT)
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

std::size_t huge_rounded(std::size_t bytes) {
  return round_up(bytes, kHugePage);
}

// Whole pages, so that all that is mapped lies in the file.
std::size_t file_bytes_of(std::size_t bytes, bool huge) {
  return round_up(bytes, huge ? kHugePage : machine_page_bytes());
}

}  // namespace

SealedMemory SealedMemory::create(const char* name, std::size_t bytes, std::string& error) {
  for (const bool huge : {true, false}) {
    if (huge && bytes < kHugePage) continue;
    SealedMemory memory;
    memory.file_ =
        UniqueFd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB | kHugePageFlag : 0u)));
    memory.bytes_ = bytes;
    memory.writable_ = true;
    const std::size_t file_bytes = file_bytes_of(bytes, huge);
    if (!memory.file_ || ftruncate(memory.file_.get(), static_cast<off_t>(file_bytes)) != 0) {
      error = std::strerror(errno);
      continue;
    }
    if (!memory.map(huge, error)) continue;
    // After our own mapping, which stays writable.
    if (fcntl(memory.file_.get(), F_ADD_SEALS, kSeals) != 0) {
      error = std::string("it cannot be sealed: ") + std::strerror(errno);
      return {};
    }
    return memory;
  }
  return {};
}

SealedMemory SealedMemory::adopt(UniqueFd file, std::size_t bytes, std::string& error) {
  struct stat status {};
  struct statfs filesystem {};
  if (fstat(file.get(), &status) != 0 || fstatfs(file.get(), &filesystem) != 0) {
    error = std::strerror(errno);
    return {};
  }
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    error = "it is not sealed against changes";
    return {};
  }
  if (static_cast<std::uint64_t>(status.st_size) < bytes) {
    error = "it has " + std::to_string(status.st_size) + " bytes instead of " + std::to_string(bytes);
    return {};
  }
  SealedMemory memory;
  memory.file_ = std::move(file);
  memory.bytes_ = bytes;
  if (!memory.map(filesystem.f_type == HUGETLBFS_MAGIC, error)) return {};
  return memory;
}

bool SealedMemory::map(bool huge, std::string& error) {
  const int protection = PROT_READ | (writable_ ? PROT_WRITE : 0);
  file_bytes_ = file_bytes_of(bytes_, huge);
  if (huge || bytes_ < kHugePage) {
    mapping_bytes_ = file_bytes_;
    mapping_ = mmap(nullptr, mapping_bytes_, protection, MAP_SHARED, file_.get(), 0);
  } else {
    // One huge page more than needed, so that the data can begin at a huge page's boundary.
    mapping_bytes_ = huge_rounded(bytes_) + kHugePage;
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    error = std::strerror(errno);
    return false;
  }
  auto* data = static_cast<std::uint8_t*>(mapping_);
  kind_ = huge ? Kind::hugetlb : Kind::small;
  if (!huge && bytes_ >= kHugePage) {
    const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
    data = reinterpret_cast<std::uint8_t*>((address + kHugePage - 1) & ~std::uintptr_t{kHugePage - 1});
    if (mmap(data, file_bytes_, protection, MAP_SHARED | MAP_FIXED, file_.get(), 0) == MAP_FAILED) {
      error = std::strerror(errno);
      return false;
    }
    if (madvise(data, bytes_, MADV_HUGEPAGE) == 0) kind_ = Kind::transparent;
  }
  madvise(data, file_bytes_, MADV_DONTDUMP);
  data_ = data;
  return true;
}

bool SealedMemory::collapse(std::size_t offset, std::size_t bytes) {
  if (kind_ == Kind::hugetlb) return true;
  const std::size_t begin = huge_rounded(offset);
  const std::size_t end = (offset + bytes) & ~(kHugePage - 1);
  if (kind_ != Kind::transparent) return false;
  return end <= begin || madvise(data_ + begin, end - begin, MADV_COLLAPSE) == 0;
}

SealedMemory::~SealedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void SealedMemory::swap(SealedMemory& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(file_bytes_, other.file_bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(writable_, other.writable_);
  std::swap(kind_, other.kind_);
}

}  // namespace engram

#include "common/huge_memory.h"

#include <sys/mman.h>

namespace engram {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Named in the call, since the kernel's default may be 1 GiB (as it was booted) or 512 MiB (aarch64 with 64 KiB pages):
// a mapping would then be far larger than what counts against the budget, and munmap would refuse its length.
constexpr int kHugePageFlag = 21 << MAP_HUGE_SHIFT;  // 2^21 bytes

}  // namespace

HugeMemory::HugeMemory(std::size_t bytes) {
  if (bytes == 0) return;
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (bytes >= kHugePage) {
    const std::size_t rounded = (bytes + kHugePage - 1) & ~(kHugePage - 1);
    void* mapped = mmap(nullptr, rounded, kProtection, kFlags | MAP_HUGETLB | kHugePageFlag, -1, 0);
    if (mapped != MAP_FAILED) {
      mapping_ = mapped;
      mapping_bytes_ = rounded;
      kind_ = Kind::hugetlb;
      data_ = static_cast<std::uint8_t*>(mapped);
    } else {
      // One huge page more than needed, so that the data can begin at a huge page's boundary.
      mapped = mmap(nullptr, rounded + kHugePage, kProtection, kFlags | MAP_NORESERVE, -1, 0);
      if (mapped == MAP_FAILED) return;
      mapping_ = mapped;
      mapping_bytes_ = rounded + kHugePage;
      const auto address = reinterpret_cast<std::uintptr_t>(mapped);
      data_ = reinterpret_cast<std::uint8_t*>((address + kHugePage - 1) & ~std::uintptr_t{kHugePage - 1});
      kind_ = madvise(data_, rounded, MADV_HUGEPAGE) == 0 ? Kind::transparent : Kind::small;
    }
  } else {
    void* mapped = mmap(nullptr, bytes, kProtection, kFlags | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return;
    mapping_ = mapped;
    mapping_bytes_ = bytes;
    data_ = static_cast<std::uint8_t*>(mapped);
    kind_ = Kind::small;
  }
  bytes_ = bytes;
  madvise(mapping_, mapping_bytes_, MADV_DONTDUMP);
}

HugeMemory::~HugeMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

}  // namespace engram

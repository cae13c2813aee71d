// Private anonymous memory in huge pages where they can be had. Pages are taken by the kernel at first touch, so a
// mapping as large as the budget costs nothing until rows arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace engram {

class HugeMemory {
 public:
  enum class Kind { none, small, transparent, hugetlb };

  HugeMemory() = default;
  // Maps `bytes` (rounded up to 2 MiB when large enough to use huge pages). Tries MAP_HUGETLB (which reserves, so a
  // later touch cannot fail), then MADV_HUGEPAGE, then plain pages. valid() is false where nothing could be mapped.
  explicit HugeMemory(std::size_t bytes);
  ~HugeMemory();
  HugeMemory(HugeMemory&& other) noexcept { swap(other); }
  HugeMemory& operator=(HugeMemory&& other) noexcept {
    HugeMemory moved(std::move(other));
    swap(moved);
    return *this;
  }

  bool valid() const { return data_ != nullptr || bytes_ == 0; }
  std::uint8_t* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Kind kind() const { return kind_; }

 private:
  void swap(HugeMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapping_bytes_, other.mapping_bytes_);
    std::swap(kind_, other.kind_);
  }

  std::uint8_t* data_ = nullptr;
  std::size_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  Kind kind_ = Kind::none;
};

}  // namespace engram

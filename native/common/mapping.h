// Mapping: a range of mapped memory with one owner.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <utility>

namespace engram {

class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  // Empty, with errno set, where mmap fails.
  static Mapping map(int fd, std::size_t bytes, int protection, int flags) {
    Mapping mapping;
    void* data = ::mmap(nullptr, bytes, protection, flags, fd, 0);
    if (data != MAP_FAILED) {
      mapping.data_ = static_cast<std::byte*>(data);
      mapping.bytes_ = bytes;
    }
    return mapping;
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }
  // Forgets the range without unmapping it.
  void forget() {
    data_ = nullptr;
    bytes_ = 0;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace engram

// Memory in a file of its own (a memfd) that its maker alone can write: whoever gets the descriptor can read and keep
// it, but neither write, shrink nor punch holes into it. In huge pages where they can be had. Pages are taken by the
// kernel at first touch and return when the last mapping and descriptor are gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "common/unique_fd.h"

namespace engram {

class SealedMemory {
 public:
  enum class Kind { small, transparent, hugetlb };

  SealedMemory() = default;
  // Memory to be filled by this process. Not valid(), with a sentence, where it cannot be had.
  static SealedMemory create(const char* name, std::size_t bytes, std::string& error);
  // Memory that an earlier process made and filled, read-only. Not valid(), with a sentence, where the file is not
  // sealed like one of ours, or shorter than `bytes`.
  static SealedMemory adopt(UniqueFd file, std::size_t bytes, std::string& error);
  ~SealedMemory();
  SealedMemory(SealedMemory&& other) noexcept { swap(other); }
  SealedMemory& operator=(SealedMemory&& other) noexcept {
    SealedMemory moved(std::move(other));
    swap(moved);
    return *this;
  }

  bool valid() const { return data_ != nullptr; }
  bool writable() const { return writable_; }
  std::uint8_t* data() const { return data_; }  // not to be written where it is not writable()
  std::size_t bytes() const { return bytes_; }
  std::size_t file_bytes() const {
    return file_bytes_;
  }  // what can be mapped: more than bytes() in reserved huge pages
  Kind kind() const { return kind_; }
  int file() const { return file_.get(); }  // owned by this object

  // Asks the kernel to put the filled range [offset, offset + bytes) into huge pages, whatever the system's setting for
  // shared memory is; copies it. False where it will not: there is no use in asking again.
  bool collapse(std::size_t offset, std::size_t bytes);

 private:
  bool map(bool huge, std::string& error);
  void swap(SealedMemory& other) noexcept;

  UniqueFd file_;
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t file_bytes_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  bool writable_ = false;
  Kind kind_ = Kind::small;
};

}  // namespace engram

// Catalogue: the layers a daemon serves, parsed from the bytes it sent and checked in full.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engram/client.h"

namespace engram {

class Catalogue {
 public:
  // More is refused: the real one has 2 layers of 24 head sizes.
  static constexpr uint64_t kMaxBytes = 64 << 20;

  // Reads and parses a catalogue descriptor. Returns 0, or a status with `error` filled in.
  static int read(int fd, uint64_t bytes, Catalogue& catalogue, engram_error* error);
  static int parse(std::span<const std::byte> bytes, Catalogue& catalogue, engram_error* error);

  const std::vector<engram_catalogue_record>& records() const { return records_; }
  // The head sizes of the layer with this handle; nullptr where there is none.
  const std::vector<int64_t>* head_sizes(uint32_t handle) const;

 private:
  std::vector<engram_catalogue_record> records_;
  std::vector<std::vector<int64_t>> head_sizes_;  // of each record
};

}  // namespace engram

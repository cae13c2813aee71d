// The machine's page: the unit in which the kernel maps memory and counts it. 4 KiB on x86-64, up to 64 KiB on aarch64.
// It has nothing to do with the pages of a table, whose unit is 4 KiB everywhere (pages/page_codec.h), nor with the
// alignment that direct reads ask for.
#pragma once
#include <unistd.h>

#include <cstdint>

namespace engram {

inline std::uint64_t machine_page_bytes() {
  static const auto kBytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return kBytes;
}

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace engram

// The double's memory: ranges of the host that are registered or pinned, ranges of the device, and their addresses.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake_gpu.h"

namespace fake_gpu {
namespace {

// Whether every page of the range is mapped, and mapped for writing.
bool is_writable(uint64_t address, uint64_t bytes, bool* mapped) {
  FILE* maps = std::fopen("/proc/self/maps", "r");
  if (maps == nullptr) std::abort();
  char line[512];
  uint64_t covered = address;
  bool writable = true;
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    uint64_t begin, end;
    char rights[5];
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &begin, &end, rights) != 3) continue;
    if (begin > covered || end <= covered) continue;
    if (rights[0] != 'r') break;
    if (rights[1] != 'w') writable = false;
    covered = end;
    if (covered >= address + bytes) break;
  }
  std::fclose(maps);
  *mapped = covered >= address + bytes;
  return writable;
}

}  // namespace

int Gpu::register_host(uint64_t address, uint64_t bytes, unsigned flags) {
  if (bytes == 0 || address == 0) return kInvalidValue;
  const bool read_only = (flags & 8) != 0;
  if (read_only && option("no_read_only") != 0) return kNotSupported;
  bool mapped = false;
  const bool writable = is_writable(address, bytes, &mapped);
  if (!mapped || (!writable && !read_only)) return kInvalidValue;
  const std::lock_guard guard(lock_);
  for (const auto& [begin, range] : host_ranges_) {
    if (begin < address + bytes && address < begin + range.bytes) return kAlreadyRegistered;
  }
  host_ranges_[address] = {bytes, read_only, false};
  return kSuccess;
}

int Gpu::unregister_host(uint64_t address) {
  const std::lock_guard guard(lock_);
  const auto range = host_ranges_.find(address);
  if (range == host_ranges_.end() || range->second.pinned) return kNotRegistered;
  host_ranges_.erase(range);
  return kSuccess;
}

const Gpu::HostRange* Gpu::host_range(uint64_t address, uint64_t bytes) {
  auto range = host_ranges_.upper_bound(address);
  if (range == host_ranges_.begin()) return nullptr;
  --range;
  return address + bytes <= range->first + range->second.bytes ? &range->second : nullptr;
}

int Gpu::device_pointer(uint64_t* result, uint64_t address) {
  const std::lock_guard guard(lock_);
  if (host_range(address, 1) == nullptr) return kInvalidValue;
  *result = address | kMappedBit;
  return kSuccess;
}

int Gpu::allocate_host(uint64_t* result, uint64_t bytes) {
  if (option("no_memory") != 0) return kOutOfMemory;
  void* memory = bytes == 0 ? nullptr : std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == nullptr) return kInvalidValue;
  std::memset(memory, 0xA5, bytes);
  const std::lock_guard guard(lock_);
  *result = reinterpret_cast<uint64_t>(memory);
  host_ranges_[*result] = {bytes, false, true};
  return kSuccess;
}

int Gpu::free_host(uint64_t address) {
  const std::lock_guard guard(lock_);
  const auto range = host_ranges_.find(address);
  if (range == host_ranges_.end() || !range->second.pinned) return kInvalidValue;
  host_ranges_.erase(range);
  std::free(reinterpret_cast<void*>(address));
  return kSuccess;
}

int Gpu::allocate(uint64_t* result, uint64_t bytes) {
  if (option("no_memory") != 0) return kOutOfMemory;
  void* memory = bytes == 0 ? nullptr : std::malloc(bytes);
  if (memory == nullptr) return kInvalidValue;
  std::memset(memory, 0xA5, bytes);
  const std::lock_guard guard(lock_);
  *result = reinterpret_cast<uint64_t>(memory) | kDeviceBit;
  device_ranges_[*result] = bytes;
  return kSuccess;
}

int Gpu::free(uint64_t address) {
  const std::lock_guard guard(lock_);
  if (device_ranges_.erase(address) == 0) return kInvalidValue;
  std::free(reinterpret_cast<void*>(address & ~kDeviceBit));
  return kSuccess;
}

uint64_t Gpu::resolve_device(uint64_t address, uint64_t bytes) {
  auto range = device_ranges_.upper_bound(address);
  if (range == device_ranges_.begin()) return 0;
  --range;
  return address + bytes <= range->first + range->second ? address & ~kDeviceBit : 0;
}

uint64_t Gpu::resolve(uint64_t address, uint64_t bytes, bool for_writing) {
  if ((address & kMappedBit) == 0) return resolve_device(address, bytes);
  const HostRange* range = host_range(address & ~kMappedBit, bytes);
  return range == nullptr || (for_writing && range->read_only) ? 0 : address & ~kMappedBit;
}

}  // namespace fake_gpu

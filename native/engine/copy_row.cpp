#include "engine/copy_row.h"

namespace engram {
namespace {

constexpr std::uint32_t kDistance =
    20;  // rows ahead: 12 costs a tenth more, 8 twice as much, beyond 20 nothing is gained

inline __attribute__((always_inline)) void prefetch_row(const std::uint8_t* row, std::uint32_t bytes) {
  for (std::uint32_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(row + offset, 0, 2);
  __builtin_prefetch(row + bytes - 1, 0, 2);  // rows are not aligned: the last line may begin inside
}

template <typename Vector>
inline __attribute__((always_inline)) void copy_vectors(std::uint8_t* target, const std::uint8_t* source,
                                                        std::uint32_t bytes) {
  std::uint32_t offset = 0;
  for (; offset + sizeof(Vector) <= bytes; offset += sizeof(Vector)) {
    Vector value;
    std::memcpy(&value, source + offset, sizeof value);
    std::memcpy(target + offset, &value, sizeof value);
  }
  for (; offset + 8 <= bytes; offset += 8) std::memcpy(target + offset, source + offset, 8);
  if (offset < bytes) std::memcpy(target + offset, source + offset, bytes - offset);
}

// kValues and kScales are 0 where the sizes are known at run time only.
template <typename Vector, std::uint32_t kValues, std::uint32_t kScales>
inline __attribute__((always_inline)) void copy_rows(const std::uint8_t* const* sources, std::uint32_t count,
                                                     const Destination& destination, std::uint64_t first) {
  const std::uint32_t value_bytes = kValues != 0 ? kValues : destination.value_bytes;
  const std::uint32_t scale_bytes = kValues != 0 ? kScales : destination.scale_bytes;
  std::uint8_t* values = destination.values + first * value_bytes;
  std::uint8_t* scales = scale_bytes != 0 ? destination.scales + first * scale_bytes : nullptr;
  for (std::uint32_t i = 0; i < count && i < kDistance; ++i) {
    if (sources[i] != nullptr) prefetch_row(sources[i], value_bytes + scale_bytes);
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i + kDistance < count && sources[i + kDistance] != nullptr) {
      prefetch_row(sources[i + kDistance], value_bytes + scale_bytes);
    }
    const std::uint8_t* source = sources[i];
    if (source == nullptr) continue;
    copy_vectors<Vector>(values + std::uint64_t{i} * value_bytes, source, value_bytes);
    if (scale_bytes != 0) {
      copy_vectors<std::uint64_t>(scales + std::uint64_t{i} * scale_bytes, source + value_bytes, scale_bytes);
    }
  }
}

template <typename Vector, std::uint32_t kValues, std::uint32_t kScales>
inline __attribute__((always_inline)) void copy_parts(const PartSources& sources, const std::int64_t* rows,
                                                      std::uint32_t count, const Destination& destination,
                                                      std::uint64_t first) {
  const std::uint32_t value_bytes = kValues != 0 ? kValues : sources.value_bytes;
  const std::uint32_t scale_bytes = kValues != 0 ? kScales : sources.scale_bytes;
  const bool split = destination.scale_bytes != 0;
  const std::uint32_t stride = split ? value_bytes : value_bytes + scale_bytes;
  const std::uint32_t scale_stride = split ? scale_bytes : stride;
  std::uint8_t* values = destination.values + first * stride;
  std::uint8_t* scales = split ? destination.scales + first * scale_bytes : values + value_bytes;
  const auto prefetch = [&](std::int64_t row) {
    if (row < 0) return;
    prefetch_row(sources.values + static_cast<std::uint64_t>(row) * value_bytes, value_bytes);
    __builtin_prefetch(sources.scales + static_cast<std::uint64_t>(row) * scale_bytes, 0, 2);
  };
  for (std::uint32_t i = 0; i < count && i < kDistance; ++i) prefetch(rows[i]);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i + kDistance < count) prefetch(rows[i + kDistance]);
    if (rows[i] < 0) {
      if (rows[i] != kNoRow) destination.put_zeros(first + i);
      continue;
    }
    const auto row = static_cast<std::uint64_t>(rows[i]);
    copy_vectors<Vector>(values + std::uint64_t{i} * stride, sources.values + row * value_bytes, value_bytes);
    copy_vectors<std::uint64_t>(scales + std::uint64_t{i} * scale_stride, sources.scales + row * scale_bytes,
                                scale_bytes);
  }
}

template <typename Vector, std::uint32_t kValues, std::uint32_t kScales>
inline __attribute__((always_inline)) void copy_slots(const SlotSources& sources, std::uint32_t count,
                                                      const Destination& destination, std::uint64_t first) {
  const std::uint32_t value_bytes = kValues != 0 ? kValues : destination.value_bytes;
  const std::uint32_t scale_bytes = kValues != 0 ? kScales : destination.scale_bytes;
  constexpr std::uint32_t kKeyBytes = sizeof(std::uint64_t);
  const std::uint32_t slot_bytes = kKeyBytes + value_bytes + scale_bytes;
  std::uint8_t* values = destination.values + first * value_bytes;
  std::uint8_t* scales = scale_bytes != 0 ? destination.scales + first * scale_bytes : nullptr;
  const auto slot_of = [&](std::uint32_t candidate) {
    return sources.slots + std::uint64_t{candidate - 1} * sources.stride;
  };
  for (std::uint32_t i = 0; i < count && i < kDistance; ++i) {
    if (sources.candidates[i] != 0) prefetch_row(slot_of(sources.candidates[i]), slot_bytes);
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i + kDistance < count && sources.candidates[i + kDistance] != 0) {
      prefetch_row(slot_of(sources.candidates[i + kDistance]), slot_bytes);
    }
    sources.missed[i] = 1;
    if (sources.candidates[i] == 0) continue;
    const std::uint8_t* slot = slot_of(sources.candidates[i]);
    std::uint64_t key;
    std::memcpy(&key, slot, sizeof key);
    if (key != sources.keys[i]) continue;
    sources.missed[i] = 0;
    const std::uint8_t* row = slot + kKeyBytes;
    copy_vectors<Vector>(values + std::uint64_t{i} * value_bytes, row, value_bytes);
    if (scale_bytes != 0) {
      copy_vectors<std::uint64_t>(scales + std::uint64_t{i} * scale_bytes, row + value_bytes, scale_bytes);
    }
  }
}

using Vector16 = std::uint8_t __attribute__((vector_size(16)));

template <std::uint32_t kValues, std::uint32_t kScales>
void copy_baseline(const std::uint8_t* const* sources, std::uint32_t count, const Destination& destination,
                   std::uint64_t first) {
  copy_rows<Vector16, kValues, kScales>(sources, count, destination, first);
}

template <std::uint32_t kValues, std::uint32_t kScales>
void copy_slots_baseline(const SlotSources& sources, std::uint32_t count, const Destination& destination,
                         std::uint64_t first) {
  copy_slots<Vector16, kValues, kScales>(sources, count, destination, first);
}

template <std::uint32_t kValues, std::uint32_t kScales>
void copy_parts_baseline(const PartSources& sources, const std::int64_t* rows, std::uint32_t count,
                         const Destination& destination, std::uint64_t first) {
  copy_parts<Vector16, kValues, kScales>(sources, rows, count, destination, first);
}

#if defined(__x86_64__)
using Vector32 = std::uint8_t __attribute__((vector_size(32)));
using Vector64 = std::uint8_t __attribute__((vector_size(64)));

template <std::uint32_t kValues, std::uint32_t kScales>
__attribute__((target("avx2"))) void copy_avx2(const std::uint8_t* const* sources, std::uint32_t count,
                                               const Destination& destination, std::uint64_t first) {
  copy_rows<Vector32, kValues, kScales>(sources, count, destination, first);
}

template <std::uint32_t kValues, std::uint32_t kScales>
__attribute__((target("avx512f,avx512vl,avx512bw"))) void copy_avx512(const std::uint8_t* const* sources,
                                                                      std::uint32_t count,
                                                                      const Destination& destination,
                                                                      std::uint64_t first) {
  copy_rows<Vector64, kValues, kScales>(sources, count, destination, first);
}

template <std::uint32_t kValues, std::uint32_t kScales>
__attribute__((target("avx2"))) void copy_slots_avx2(const SlotSources& sources, std::uint32_t count,
                                                     const Destination& destination, std::uint64_t first) {
  copy_slots<Vector32, kValues, kScales>(sources, count, destination, first);
}

template <std::uint32_t kValues, std::uint32_t kScales>
__attribute__((target("avx512f,avx512vl,avx512bw"))) void copy_slots_avx512(const SlotSources& sources,
                                                                            std::uint32_t count,
                                                                            const Destination& destination,
                                                                            std::uint64_t first) {
  copy_slots<Vector64, kValues, kScales>(sources, count, destination, first);
}

template <std::uint32_t kValues, std::uint32_t kScales>
__attribute__((target("avx2"))) void copy_parts_avx2(const PartSources& sources, const std::int64_t* rows,
                                                     std::uint32_t count, const Destination& destination,
                                                     std::uint64_t first) {
  copy_parts<Vector32, kValues, kScales>(sources, rows, count, destination, first);
}

template <std::uint32_t kValues, std::uint32_t kScales>
__attribute__((target("avx512f,avx512vl,avx512bw"))) void copy_parts_avx512(const PartSources& sources,
                                                                            const std::int64_t* rows,
                                                                            std::uint32_t count,
                                                                            const Destination& destination,
                                                                            std::uint64_t first) {
  copy_parts<Vector64, kValues, kScales>(sources, rows, count, destination, first);
}

#endif

template <std::uint32_t kValues, std::uint32_t kScales>
Copiers choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
    return {copy_avx512<kValues, kScales>, copy_slots_avx512<kValues, kScales>};
  }
  if (__builtin_cpu_supports("avx2")) return {copy_avx2<kValues, kScales>, copy_slots_avx2<kValues, kScales>};
#endif
  return {copy_baseline<kValues, kScales>, copy_slots_baseline<kValues, kScales>};
}

template <std::uint32_t kValues, std::uint32_t kScales>
PartCopier choose_parts() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
    return copy_parts_avx512<kValues, kScales>;
  }
  if (__builtin_cpu_supports("avx2")) return copy_parts_avx2<kValues, kScales>;
#endif
  return copy_parts_baseline<kValues, kScales>;
}

}  // namespace

PartCopier choose_part_copier(std::uint32_t value_bytes, std::uint32_t scale_bytes) {
  return value_bytes == 256 && scale_bytes == 8 ? choose_parts<256, 8>() : choose_parts<0, 0>();
}

Copiers choose_copiers(std::uint32_t value_bytes, std::uint32_t scale_bytes) {
  if (value_bytes == 264 && scale_bytes == 0) return choose<264, 0>();
  if (value_bytes == 256 && scale_bytes == 8) return choose<256, 8>();
  return choose<0, 0>();
}

}  // namespace engram

// Which layers are to be resident and how the budget is divided among caches: arithmetic alone, so that a change can be
// refused before anything is touched.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/layer.h"

namespace engram {

// Layers of one row size and one group share a cache. Group 0 is the common one.
struct CacheKey {
  std::uint32_t row_bytes = 0;
  std::uint32_t group = 0;
  auto operator<=>(const CacheKey&) const = default;
};

struct PlacementPlan {
  std::vector<Layer*> resident;
  std::vector<Layer*> cached;
  std::map<CacheKey, std::uint64_t> cache_bytes;  // of each cache that `cached` needs
};

inline CacheKey cache_key_of(const Layer& layer) {
  return {layer.row_bytes, layer.policy.cache_group};
}

// Layers whose tier is automatic become resident where the budget covers the rows of all layers. What resident layers
// and shares leave is divided among common caches by the sizes of their layers. False, with a sentence, where resident
// layers and shares together exceed the budget. Caller holds the engine's lock on layers.
// held_bytes of the budget are taken by generations that clients still have mapped; a layer of `layers` that clients
// have mapped must stay resident in its layout.
bool plan_placement(const std::vector<Layer*>& layers, std::uint64_t dram_bytes, std::uint64_t held_bytes,
                    PlacementPlan& plan, std::string& error);

}  // namespace engram

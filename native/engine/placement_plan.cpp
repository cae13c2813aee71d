#include "engine/placement_plan.h"

#include <algorithm>
#include <cmath>

namespace engram {
namespace {

constexpr std::size_t kNamedLayers = 4;

std::string too_little(const PlacementPlan& plan, std::uint64_t resident_bytes, std::uint64_t share_bytes, double share,
                       std::uint64_t dram_bytes) {
  std::string layers;
  for (std::size_t i = 0; i < std::min(plan.resident.size(), kNamedLayers); ++i) {
    layers += (i == 0 ? "" : ", ") + std::to_string(plan.resident[i]->layer);
  }
  if (plan.resident.size() > kNamedLayers) layers += ", ...";
  std::string text = "resident layers (" + layers + ") take " + std::to_string(resident_bytes) + " bytes";
  if (share_bytes != 0) text += " and shares of caches " + std::to_string(share_bytes);
  text += ", the DRAM budget is " + std::to_string(dram_bytes) + ": ";
  if (share < 1) {
    const auto needed = static_cast<std::uint64_t>(
        std::ceil(static_cast<long double>(resident_bytes) / (1 - static_cast<long double>(share))));
    text += "raise dram to " + std::to_string(needed) + " or more, or ";
  }
  return text + "let layers be cached";
}

// Whether clients have the rows mapped in another layout than they are to have.
bool is_mapped_otherwise(const Layer& layer) {
  const std::shared_ptr<ResidentRows> resident = layer.placement()->resident;
  return layer.maps != 0 && resident != nullptr && resident->row_layout() != layer.resident_layout();
}

}  // namespace

bool plan_placement(const std::vector<Layer*>& layers, std::uint64_t budget_bytes, std::uint64_t held_bytes,
                    PlacementPlan& plan, std::string& error) {
  const std::uint64_t dram_bytes = budget_bytes - std::min(budget_bytes, held_bytes);
  std::uint64_t all_bytes = 0;
  for (const Layer* layer : layers) all_bytes += layer->bytes();
  const bool covers = dram_bytes >= all_bytes;
  std::uint64_t resident_bytes = 0;
  std::uint64_t share_bytes = 0;
  double share = 0;
  std::uint64_t common_bytes = 0;                     // of layers that common caches serve
  std::map<CacheKey, std::uint64_t> bytes_of_common;  // the same by cache
  for (Layer* layer : layers) {
    const engram_layer_policy& policy = layer->policy;
    if (policy.tier == ENGRAM_POLICY_RESIDENT || (policy.tier == ENGRAM_POLICY_AUTO && covers)) {
      plan.resident.push_back(layer);
      resident_bytes += layer->bytes();
      if (!is_mapped_otherwise(*layer)) continue;
    }
    if (layer->maps != 0) {
      error =
          "layer " + std::to_string(layer->layer) + " is mapped by " + std::to_string(layer->maps.load()) +
          " client(s), so it must stay resident as it is: close their maps, or give it the tier \"resident\" and its "
          "layout and a budget that covers it";
      return false;
    }
    plan.cached.push_back(layer);
    const CacheKey key = cache_key_of(*layer);
    if (policy.cache_group == 0) {
      bytes_of_common[key] += layer->bytes();
      common_bytes += layer->bytes();
    } else if (!plan.cache_bytes.contains(key)) {
      const auto bytes = static_cast<std::uint64_t>(static_cast<long double>(dram_bytes) * policy.cache_share);
      plan.cache_bytes[key] = bytes;
      share_bytes += bytes;
      share += policy.cache_share;
    }
  }
  if (resident_bytes > dram_bytes || share_bytes > dram_bytes - resident_bytes) {
    error = too_little(plan, resident_bytes, share_bytes, share, dram_bytes);
    if (held_bytes != 0) {
      error += " (of the whole budget, " + std::to_string(held_bytes) +
               " bytes are generations that clients have mapped: close those maps)";
    }
    return false;
  }
  const std::uint64_t rest = dram_bytes - resident_bytes - share_bytes;
  for (const auto& [key, bytes] : bytes_of_common) {
    plan.cache_bytes[key] = static_cast<std::uint64_t>(
        static_cast<long double>(rest) * static_cast<long double>(bytes) / static_cast<long double>(common_bytes));
  }
  return true;
}

}  // namespace engram

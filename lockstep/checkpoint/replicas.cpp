#include "lockstep/checkpoint/replicas.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <utility>

#include "lockstep/base/number_list.h"
#include "lockstep/checkpoint/sharded/checksum.h"

namespace lockstep::internal {

using Json = nlohmann::json;

Json digests_of(const ReplicaChecksums& checksums) {
  Json digests = Json::object();
  for (const auto& [set, tensors] : checksums) {
    const std::string text = Json(tensors).dump();
    digests[set] = xxh3(text);
  }
  return digests;
}

void require_equal_replicas(const std::vector<Json>& digests,
                            const ReplicaChecksums& mine, const Ranks& ranks) {
  std::map<std::string, Json> known;
  std::set<std::string> different;
  for (const Json& rank : digests) {
    for (const auto& [set, digest] : rank.items()) {
      const auto& first = known.try_emplace(set, digest).first->second;
      if (first != digest) different.insert(set);
    }
  }
  if (different.empty()) return;
  Json checksums = Json::object();
  for (const auto& [set, tensors] : mine) {
    if (different.contains(set)) checksums[set] = tensors;
  }
  // Ranks with a tensor, by name and set, and by checksum.
  std::map<std::pair<std::string, std::string>,
           std::map<std::string, std::vector<size_t>>>
      holders;
  const std::vector<Json> all = ranks.gather_objects(checksums);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& [set, tensors] : all[rank].items()) {
      for (const auto& [name, checksum] : tensors.items()) {
        holders[{name, set}][checksum.get<std::string>()].push_back(rank);
      }
    }
  }
  for (auto& [tensor, by_values] : holders) {
    if (by_values.size() == 1) continue;
    std::vector<std::vector<size_t>> groups;
    for (auto& [text, same] : by_values) groups.push_back(std::move(same));
    std::sort(groups.begin(), groups.end());
    throw std::invalid_argument(
        "the tensor \"" + tensor.first +
        "\" must be equal on all ranks that have it, "
        "but its values on " +
        name_numbers("rank", groups[0]) + " differ from those on " +
        name_numbers("rank", groups[1]) +
        ", so that the result would be a mixture. "
        "Average or broadcast the tensors first, and look for the step at "
        "which they drift apart "
        "(verify_replicated())");
  }
}

}  // namespace lockstep::internal

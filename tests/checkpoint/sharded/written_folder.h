#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/sharded/save_plan.h"
#include "lockstep/checkpoint/sharded/shard_file.h"

namespace lockstep::internal::testing {

// Whether the manifest lists the parts; those of older versions do not.
enum class Parts { kNotListed, kListed };

// Writes a snapshot as ranks with these shards write it together, without
// ranks.
inline SavePlan write_folder(
    const std::string& folder,
    const std::vector<std::vector<TensorShard>>& by_rank,
    Manifest manifest = {}, Parts parts = Parts::kNotListed) {
  std::vector<nlohmann::json> claims;
  for (const auto& shards : by_rank) claims.push_back(claims_of(shards));
  const SavePlan plan = plan_save(claims);
  SaveFiles files;
  std::filesystem::create_directories(folder);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto entries = entries_of(plan, rank, by_rank[rank]);
    for (size_t i = 0; i < entries.size(); ++i) {
      manifest.files.push_back(write_shard_file(
          files, folder, shard_file_name(rank, i, entries.size()), entries[i],
          {{kShardKey, "{}"}}));
    }
  }
  manifest.world_size = static_cast<int64_t>(by_rank.size());
  manifest.tensors = plan.tensors;
  if (parts == Parts::kListed) manifest.parts = parts_of(plan);
  std::ofstream(folder + "/" + kManifestName, std::ios::binary)
      << text_of(manifest);
  return plan;
}

}  // namespace lockstep::internal::testing

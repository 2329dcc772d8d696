#include "lockstep/checkpoint/save.h"

#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/file_save.h"
#include "lockstep/checkpoint/rank_failure.h"
#include "lockstep/checkpoint/sharded/sharded_save.h"
#include "lockstep/checkpoint/snapshot_path.h"
#include "lockstep/comm/accelerator.h"

namespace lockstep::internal {

void require_savable(const std::string& path, const TrainingState& state,
                     const SnapshotOptions& options, const Ranks& ranks) {
  const bool folder = names_folder(path, ranks);
  const auto all = gather_or_fail(
      ranks,
      [&](nlohmann::json& mine) {
        if (folder) {
          mine["claims"] = claims_before_training(state, options);
          return;
        }
        // The first rank saves; the others' parts are only compared, and may be
        // missing.
        if (ranks.rank() == 0 || state.model) {
          check_for_file(path, state, options, ranks.size());
        }
        mine["claims"] = file_claims_of(state);
      },
      failed_save(path, "cannot be saved"));
  std::vector<nlohmann::json> claims;
  for (const auto& rank : all) claims.push_back(rank.at("claims"));
  // This process alone has no parts of the other ranks to compare with.
  if (ranks.are_imagined()) return;
  folder ? require_same_training(claims) : require_same_in_file(claims);
}

std::unique_ptr<Save> begin_save(const std::string& path,
                                 const TrainingState& state,
                                 const SnapshotOptions& options,
                                 const Ranks& ranks, SaveFiles& files) {
  std::unique_ptr<Save> save;
  if (names_folder(path, ranks)) {
    save = std::make_unique<ShardedSave>(path, state, options, ranks, files);
  } else {
    save = std::make_unique<FileSave>(path, state, options, ranks);
  }
  // Other threads may read the tensors.
  for (const auto& entry : save->tensors()) {
    finish_current_stream(*entry.tensor);
  }
  for (const auto& entry : save->tensors_to_compare()) {
    finish_current_stream(entry.tensor);
  }
  return save;
}

}  // namespace lockstep::internal

#include "lockstep/checkpoint/save.h"

#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/file_save.h"
#include "lockstep/checkpoint/rank_failure.h"
#include "lockstep/checkpoint/sharded/sharded_save.h"
#include "lockstep/checkpoint/snapshot_path.h"

namespace lockstep::internal {

void require_savable(const std::string& path, const TrainingState& state,
                     const SnapshotOptions& options, const Ranks& ranks) {
  const bool folder = names_folder(path, ranks);
  std::exception_ptr failure;
  nlohmann::json mine = nlohmann::json::object();
  try {
    if (folder) {
      mine["claims"] = claims_before_training(state, options);
    } else {
      // The first rank saves; the others' parts are only compared, and may be
      // missing.
      if (ranks.rank() == 0 || state.model) {
        check_for_file(path, state, options, ranks.size());
      }
      mine["claims"] = file_claims_of(state);
    }
  } catch (...) {
    failure = std::current_exception();
    mine[kFailed] = RankFailure(failure).text();
  }
  const auto all = ranks.gather_objects(mine);
  if (failure) std::rethrow_exception(failure);
  std::vector<nlohmann::json> claims;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].contains(kFailed)) {
      RankFailure::from_text(all[rank].at(kFailed).get<std::string>())
          ->throw_for(path, "cannot be saved: " + list_of_ranks({rank}) + ": ");
    }
    claims.push_back(all[rank].at("claims"));
  }
  // This process alone has no parts of the other ranks to compare with.
  if (ranks.are_imagined()) return;
  folder ? require_same_training(claims) : require_same_in_file(claims);
}

std::unique_ptr<Save> begin_save(const std::string& path,
                                 const TrainingState& state,
                                 const SnapshotOptions& options,
                                 const Ranks& ranks, SaveFiles& files) {
  if (names_folder(path, ranks)) {
    return std::make_unique<ShardedSave>(path, state, options, ranks, files);
  }
  return std::make_unique<FileSave>(path, state, options, ranks);
}

}  // namespace lockstep::internal

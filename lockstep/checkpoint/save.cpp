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
  try {
    if (folder) {
      check_for_folder(state, options);
    } else if (ranks.rank() == 0) {  // which saves
      check_for_file(path, state, options, ranks.size());
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const auto all =
      ranks.gather_objects(failure ? RankFailure(failure).text() : "");
  if (failure) std::rethrow_exception(failure);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (const auto other =
            RankFailure::from_text(all[rank].get<std::string>())) {
      other->throw_for(path,
                       "cannot be saved: " + list_of_ranks({rank}) + ": ");
    }
  }
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

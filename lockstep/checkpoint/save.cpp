#include "lockstep/checkpoint/save.h"

#include "lockstep/checkpoint/file_save.h"
#include "lockstep/checkpoint/sharded/sharded_save.h"
#include "lockstep/checkpoint/snapshot_path.h"

namespace lockstep::internal {

std::unique_ptr<Save> begin_save(const std::string& path,
                                 const TrainingState& state,
                                 const SnapshotOptions& options,
                                 const Ranks& ranks, SaveFiles& files) {
  if (form_of(path, ranks) == SnapshotForm::kFolder) {
    return std::make_unique<ShardedSave>(path, state, options, ranks, files);
  }
  return std::make_unique<FileSave>(path, state, options, ranks);
}

}  // namespace lockstep::internal

#pragma once

#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/sharded/save_files.h"
#include "lockstep/checkpoint/sharded/save_plan.h"
#include "lockstep/checkpoint/sharded/snapshot_folder.h"
#include "lockstep/checkpoint/training_state.h"

namespace lockstep::internal {

// One save of all ranks into a folder of snapshots, in three steps:
//
//   ShardedSave save(folder, state, options, ranks, files);   // collective
//   save.write();                                             // no
//   communication const std::string path = save.commit();                   //
//   collective
//
// The constructor plans what every rank writes, and rank 0 makes a folder with
// a temporary name. write() writes this rank's files there, synchronised. In
// commit() rank 0 waits until all ranks have written, writes the manifest,
// renames the folder, sets the link `latest` and removes old snapshots. At
// every moment the folder has the snapshots from before, or also the new one,
// whole.
//
// If anything fails on one rank, the constructor or commit() throws on all:
// that rank its own error, the others a SnapshotError that names the rank and
// quotes it. write() does not throw; its error surfaces in commit(). The
// destructor removes what was written if commit() has not succeeded.
class ShardedSave {
 public:
  // `files` must outlive this object. Between here and the end of write() the
  // tensors of `state` must not change.
  ShardedSave(const std::string& folder, const TrainingState& state,
              const SnapshotOptions& options, const Ranks& ranks,
              SaveFiles& files);
  ~ShardedSave();

  // What this rank writes, by file. The elements may be replaced by copies
  // before write().
  std::vector<std::vector<PlannedEntry>>& entries() { return entries_; }

  void write();
  std::string commit();

 private:
  void collect(const TrainingState& state, nlohmann::json& mine);
  void make_plan(const std::vector<nlohmann::json>& all);
  void begin_folder();
  std::string finish(const std::vector<nlohmann::json>& written);

  std::string folder_;
  SnapshotOptions options_;
  Ranks ranks_;
  SaveFiles& files_;

  std::vector<TensorShard> shards_;
  Manifest manifest_;  // complete on rank 0 only
  std::map<std::string, std::string> metadata_;
  SavePlan plan_;
  std::vector<std::vector<PlannedEntry>> entries_;
  std::unique_ptr<SnapshotBeingSaved> being_saved_;  // on rank 0
  std::string aside_;                                // where to write
  std::vector<WrittenFile> written_;
  std::exception_ptr failure_;
};

}  // namespace lockstep::internal

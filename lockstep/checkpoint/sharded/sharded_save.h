#pragma once

#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/sharded/save_files.h"
#include "lockstep/checkpoint/sharded/save_plan.h"
#include "lockstep/checkpoint/sharded/snapshot_folder.h"
#include "lockstep/checkpoint/training_state.h"

namespace lockstep::internal {

// Returns what this rank has to save as far as it is known before training, and
// does not change then. Throws std::invalid_argument if a folder of snapshots
// cannot hold it. Not collective.
nlohmann::json claims_before_training(const TrainingState& state,
                                      const SnapshotOptions& options);

// Throws std::invalid_argument, the same on all ranks, if the ranks cannot save
// together: other items, optimizers or shapes. `claims`: those of all ranks, in
// rank order.
void require_same_training(const std::vector<nlohmann::json>& claims);

// A save into a folder of snapshots, to which every rank writes its part.
//
// The constructor plans what every rank writes, and rank 0 makes a folder with
// a temporary name. write() writes this rank's files there, synchronised. In
// commit() rank 0 waits until all ranks have written, writes the manifest,
// renames the folder, sets the link `latest` and removes old snapshots. At
// every moment the folder has the snapshots from before, or also the new one,
// whole.
class ShardedSave final : public Save {
 public:
  // Collective. `files` must outlive this object.
  ShardedSave(const std::string& folder, const TrainingState& state,
              const SnapshotOptions& options, const Ranks& ranks,
              SaveFiles& files);
  ~ShardedSave() override;

  std::vector<TensorToWrite> tensors() override;
  std::vector<TensorToCompare> tensors_to_compare() override;
  void write() override;
  std::string commit(const Ranks& ranks) override;

 private:
  friend nlohmann::json claims_before_training(const TrainingState& state,
                                               const SnapshotOptions& options);
  // TrainingState::optimizer as "", and the items that are optimizers.
  using OptimizerStates = std::map<std::string, OptimizerShards::State>;

  // A save of one rank that is not made, for claims_before_training().
  ShardedSave(const SnapshotOptions& options, SaveFiles& files);

  // Finds out what this rank has, and what it tells the others: `mine`.
  // `state_of`: optimizer_state_of() or known_state_of().
  void collect(const TrainingState& state,
               OptimizerShards::State (*state_of)(torch::optim::Optimizer&),
               nlohmann::json& mine);
  void add_items(const TrainingState& state, const OptimizerStates& optimizers,
                 nlohmann::json& of_ranks);
  void add_scheduler(const ResumableScheduler& scheduler);
  void add_ranks_of_item(const std::vector<nlohmann::json>& all,
                         const std::string& name, Manifest::Item& item) const;
  void make_plan(const std::vector<nlohmann::json>& all);
  void begin_folder(const Ranks& ranks);
  // A set is what the same ranks have: an index in plan_.holders.
  ReplicaChecksums checksums_of_replicas() const;
  std::string finish(const std::vector<nlohmann::json>& written);

  std::string folder_;
  SnapshotOptions options_;
  size_t rank_;
  size_t ranks_;
  SaveFiles& files_;

  std::vector<TensorShard> shards_;
  std::set<std::string> buffers_;  // by the names of shards
  Manifest manifest_;              // complete on rank 0 only
  std::map<std::string, std::string> metadata_;
  SavePlan plan_;
  std::vector<std::vector<PlannedEntry>> entries_;
  // Checksums of what was written, by file of this rank.
  std::vector<std::map<std::string, std::string>> checksums_;
  struct Replica {
    PlannedEntry entry;
    std::vector<uint64_t> checksums;
  };
  std::vector<Replica> replicas_;
  std::unique_ptr<SnapshotBeingSaved> being_saved_;  // on rank 0
  std::string aside_;                                // where to write
  std::vector<WrittenFile> written_;
};

}  // namespace lockstep::internal

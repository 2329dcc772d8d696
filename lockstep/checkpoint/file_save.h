#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// The save of a file (snapshot.h), which the first rank writes alone. Model,
// optimizer, scheduler and numbers are those of that rank. The other ranks give
// the states of their generators, and the checksums of their parameters and
// optimizer state, which must be those of the first rank.
class FileSave final : public Save {
 public:
  // Collective.
  FileSave(const std::string& path, const TrainingState& state,
           const SnapshotOptions& options, const Ranks& ranks);

  // The first returns none on the other ranks, the second none on the first.
  std::vector<TensorToWrite> tensors() override;
  std::vector<TensorToCompare> tensors_to_compare() override;
  void write() override;
  std::string commit(const Ranks& ranks) override;

 private:
  void collect(const TrainingState& state, const SnapshotOptions& options,
               size_t ranks);
  std::vector<TensorToWrite> all_tensors();
  std::vector<TensorToWrite> replicas();
  // A set is the model, the optimizer or an item.
  ReplicaChecksums checksums_of_replicas();

  std::string path_;
  bool writes_;
  bool compares_;
  Snapshot snapshot_;                    // on the other ranks: what is compared
  std::set<std::string> buffers_;        // by the names of tensors()
  std::set<std::string> of_first_rank_;  // sets that are not compared
  std::map<std::string, std::vector<uint64_t>> checksums_;  // of replicas()
  std::unique_ptr<AtomicFile> file_;
};

// Throws std::invalid_argument if a file at `path`, which `ranks` ranks save,
// cannot hold the parts of `state` as far as they are known before the first
// step, or what `options` ask for. Not collective.
void check_for_file(const std::string& path, const TrainingState& state,
                    const SnapshotOptions& options, size_t ranks);

// Returns what this rank has of such a training, null if it has no model: the
// kinds of the items, and dtype and shape of each parameter. Throws
// std::invalid_argument for names of items. Not collective.
nlohmann::json file_claims_of(const TrainingState& state);

// Throws std::invalid_argument, the same on all ranks, if the ranks have other
// items, or parameters of other shapes. `claims`: those of all ranks, in rank
// order.
void require_same_in_file(const std::vector<nlohmann::json>& claims);

// Throws what save_snapshot_file() throws for names and dtypes that the format
// cannot hold. Writes nothing, and reads no elements.
void check_snapshot_file(const std::string& path, const Snapshot& snapshot);

// Does what save_snapshot_file() does, except for the commit() of the file.
std::unique_ptr<AtomicFile> write_snapshot_file(const std::string& path,
                                                const Snapshot& snapshot);

}  // namespace lockstep::internal

#pragma once

#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// The save of a file (snapshot.h), which the first rank writes alone. Model,
// optimizer, scheduler and numbers are those of that rank; the other ranks give
// the states of their generators.
class FileSave final : public Save {
 public:
  // Collective.
  FileSave(const std::string& path, const TrainingState& state,
           const SnapshotOptions& options, const Ranks& ranks);

  // Returns none on the other ranks.
  std::vector<TensorToWrite> tensors() override;
  void write() override;
  std::string commit(const Ranks& ranks) override;

 private:
  void collect(const TrainingState& state, const SnapshotOptions& options,
               size_t ranks);
  // Collective. Throws on every rank if the first has failed.
  void agree(const Ranks& ranks) const;

  std::string path_;
  bool writes_;
  Snapshot snapshot_;
  std::set<std::string> buffers_;
};

// Throws std::invalid_argument if a file at `path`, which `ranks` ranks save,
// cannot hold the parts of `state` that are known before the first step, or
// what `options` ask for. Not collective.
void check_for_file(const std::string& path, const TrainingState& state,
                    const SnapshotOptions& options, size_t ranks);

}  // namespace lockstep::internal

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// A tensor of a snapshot, under the name that Python gives it:
//
//   0.weight                            as in the module's state_dict()
//   optimizer.state.0.weight.exp_avg    optimizer state of the parameter
//   optimizer.state.0.exp_avg           the same in a file, which numbers the
//                                       parameters, as Python's
//                                       optimizer.state_dict() does
//   optimizer.param_groups.0.lr         a hyperparameter that is a tensor
//   lockstep.generator.0                the generator's state of a rank
struct StoredTensor {
  enum class Kind { kModel, kOptimizerState, kOther };
  Kind kind = Kind::kModel;
  std::string name;
  // The name of optimizer state by its parameter's number; empty if the
  // snapshot does not number parameters (a folder of PyTorch's).
  std::string numbered_name{};
  // Shape and dtype. Has no memory (device "meta").
  at::Tensor outline{};
  bool has_checksum = false;

  // Where a folder has the tensor. Nothing in a single file.
  struct Place {
    // "replicate", "shard" or "flat" (docs/internals/snapshot-formats.md);
    // empty if the folder does not say.
    std::string placement{};
    // The ranks whose files have a part of it, ascending; empty if the files'
    // names do not say.
    std::vector<size_t> ranks{};
    std::vector<std::string> files{};
  };
  std::optional<Place> place{};
};

// A snapshot on the disk, whose tensors are read one at a time. Opening it
// reads names, shapes and numbers, and compares the checksums of these only.
class StoredSnapshot {
 public:
  // Opens what load_snapshot_file() reads: a file of either format, a folder,
  // an index of Hugging Face's; and one file of a folder. Throws the same
  // errors.
  static std::unique_ptr<StoredSnapshot> open(const std::string& path);

  virtual ~StoredSnapshot() = default;
  StoredSnapshot(const StoredSnapshot&) = delete;
  StoredSnapshot& operator=(const StoredSnapshot&) = delete;

  // The snapshot that was opened: of a folder of snapshots, the newest one.
  const std::string& path() const { return path_; }
  // Only its numbers and texts, and how many generator states there are.
  const Snapshot& numbers() const { return numbers_; }
  // The model's tensors in their order, the optimizer's by parameter, others.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // Whether optimizer state has the names of parameters, not only numbers.
  bool names_parameters() const { return names_parameters_; }

  // Reads a tensor and compares its checksums, if there are any. Throws
  // SnapshotError that names file and tensor.
  virtual at::Tensor read(const StoredTensor& tensor) const = 0;

  // Reads whatever belongs to no tensor and was not read yet, and returns a
  // line for each damage there.
  virtual std::vector<std::string> damage_elsewhere() const { return {}; }

 protected:
  explicit StoredSnapshot(std::string path) : path_(std::move(path)) {}

  std::string path_;
  Snapshot numbers_{};
  std::vector<StoredTensor> tensors_{};
  bool names_parameters_ = false;
};

}  // namespace lockstep::internal

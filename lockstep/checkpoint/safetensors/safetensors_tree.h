#pragma once

#include <map>
#include <string>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// A snapshot as safetensors can hold it: named tensors, and one text.
struct SafetensorsTree {
  // The model's tensors under their own names, all others under "lockstep.", in
  // file form (tensor_bytes.h).
  NamedTensors tensors;
  // Further names of the model's tensors, each with the name under which the
  // snapshot has the tensor: entries of "__metadata__", as those of Python's
  // safetensors.torch.save_model().
  std::map<std::string, std::string> aliases{};
  // JSON with everything that is not a tensor. Empty if the file was not
  // written by Lockstep.
  std::string description;
};

// No name of the model's begins with this, and no key of "__metadata__" that is
// an alias.
inline constexpr const char* kReserved = "lockstep.";

// The key of "__metadata__" that holds the description.
inline constexpr const char* kSnapshotKey = "lockstep.snapshot";

// Throws std::invalid_argument if a name occurs twice, is reserved, or is not
// UTF-8.
SafetensorsTree safetensors_tree_of(const Snapshot& snapshot);

// Throws std::runtime_error (or an error of nlohmann::json) that says what is
// wrong with the description or what is missing.
Snapshot snapshot_of(const SafetensorsTree& tree);

}  // namespace lockstep::internal

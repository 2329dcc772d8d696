#pragma once

#include <string>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// A snapshot as safetensors can hold it: named tensors, and one text.
struct SafetensorsTree {
  // The model's tensors under their own names, all others under "lockstep.", in
  // file form (tensor_bytes.h).
  NamedTensors tensors;
  // JSON with everything that is not a tensor. Empty if the file was not
  // written by Lockstep.
  std::string description;
};

// The key of "__metadata__" that holds the description.
inline constexpr const char* kSnapshotKey = "lockstep.snapshot";

// Throws std::invalid_argument if a name occurs twice, is reserved, or is not
// UTF-8.
SafetensorsTree safetensors_tree_of(const Snapshot& snapshot);

// Throws std::runtime_error (or an error of nlohmann::json) that says what is
// wrong with the description or what is missing.
Snapshot snapshot_of(const SafetensorsTree& tree);

}  // namespace lockstep::internal

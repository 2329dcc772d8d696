#pragma once

#include <string>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

// A snapshot as safetensors can hold it: named tensors, and one text.
struct SafetensorsTree {
  // The model's under their own names, all others under "lockstep.", in file
  // form (tensor_bytes.h).
  NamedTensors tensors;
  // JSON: what is no tensor. Empty in a file that is not of Lockstep.
  std::string description;
};

// The key of "__metadata__" under which the description is stored.
inline constexpr const char* kSnapshotKey = "lockstep.snapshot";

// Throws std::invalid_argument where a name is there twice, is reserved, or is
// not UTF-8.
SafetensorsTree safetensors_tree_of(const Snapshot& snapshot);

// Throws std::runtime_error (or an error of nlohmann::json) that says what is
// wrong with the description or what is missing.
Snapshot snapshot_of(const SafetensorsTree& tree);

}  // namespace lockstep

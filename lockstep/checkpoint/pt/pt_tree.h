#pragma once

#include "lockstep/checkpoint/pt/pickle_value.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// Returns the dict that a .pt file holds. Tensors are in file form
// (tensor_bytes.h). Throws std::invalid_argument if a name occurs twice.
PickleValue tree_of(const Snapshot& snapshot);

// Returns a bare state_dict, an OrderedDict, in the same way.
PickleValue tree_of(const NamedTensors& tensors);

// Returns the snapshot in such a dict, which Lockstep or another program has
// written: it must have MODEL_STATE or be a state_dict itself; unknown keys are
// ignored. Throws PickleError.
Snapshot snapshot_of(const PickleValue& tree);

// Returns only the model of such a dict. A module's `_extra_state` that is not
// a tensor has its name, and an undefined tensor. Throws PickleError.
NamedTensors model_of(const PickleValue& tree);

// Returns the state_dict under `key` of such a dict, in the same way. The dict
// may hold anything else. Throws PickleError if the tree is not a dict,
// std::invalid_argument if it has no such key, or if the entry is not a
// state_dict.
NamedTensors entry_of(const PickleValue& tree, const std::string& key);

}  // namespace lockstep::internal

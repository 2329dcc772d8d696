#pragma once

#include "lockstep/checkpoint/pickle_value.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

// The dict that a .pt file holds. Tensors are in file form (tensor_bytes.h).
// Throws std::invalid_argument where a name is there twice.
PickleValue tree_of(const Snapshot& snapshot);

// The OrderedDict that a state_dict by itself is, in the same way.
PickleValue tree_of(const NamedTensors& tensors);

// The snapshot in such a dict, of ours or of somebody else: MODEL_STATE is
// needed, or the dict is a state_dict itself; keys that are not known are
// ignored. Throws PickleError.
Snapshot snapshot_of(const PickleValue& tree);

// The state_dict under `key` of such a dict, whatever else is in it. Throws
// PickleError if the tree is no dict, std::invalid_argument if it has no such
// key, or if something else is there.
NamedTensors entry_of(const PickleValue& tree, const std::string& key);

}  // namespace lockstep

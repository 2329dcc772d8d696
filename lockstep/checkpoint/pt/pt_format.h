#pragma once

#include <functional>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/pt/pickle.h"
#include "lockstep/checkpoint/pt/zip_reader.h"
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

// Returns whether it is a file of torch.save; otherwise it is a safetensors
// file. The content decides, not the name. Throws SnapshotError if it is
// neither.
bool is_pt(const InputFile& file);

// Files of torch.save: a zip archive with a pickle, which
// torch.load(weights_only=True) reads. `tree` is what tree_of() makes: a dict
// with MODEL_STATE, EPOCHS_RUN, STEP, OPTIMIZER_STATE, SCHEDULER_STATE,
// SAMPLER_STATE, GENERATOR_STATES, METADATA and ITEMS, or a state_dict;
// read_pt() reads either. They throw the errors of save_snapshot_file() and
// load_snapshot_file(). write_pt() throws std::invalid_argument, before it
// writes anything, if there is more text than read_pt() would read.
void write_pt(AtomicFile& file, const PickleValue& tree);
Snapshot read_pt(const InputFile& file);

// Returns the same snapshot without the tensors' elements, which are not read:
// the tensors have no memory (device "meta"). Calls `found` for each of their
// storages, with the entry that holds its bytes. Elements that a tensor of
// `dtype` may not have (a bool that is neither 0 nor 1) are not noticed. Throws
// the same errors.
using FoundStorage =
    std::function<void(const c10::Storage& storage,
                       const ZipReader::Entry& entry, c10::ScalarType dtype)>;
Snapshot read_pt_outline(const InputFile& file, const FoundStorage& found);

// Returns the state_dict under `key` of the file's dict; without a key only the
// model of the snapshot. As of model_of(), a tensor may be undefined.
NamedTensors read_pt_entry(const InputFile& file, const std::string& key);

}  // namespace lockstep::internal

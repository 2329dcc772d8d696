#pragma once

#include "lockstep/checkpoint/atomic_file.h"
#include "lockstep/checkpoint/input_file.h"
#include "lockstep/checkpoint/pt/pickle_value.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// Files of torch.save: a zip archive with a pickle, which
// torch.load(weights_only=True) reads. `tree` is what pt_tree.h makes: a dict
// with MODEL_STATE, EPOCHS_RUN, STEP, OPTIMIZER_STATE, SCHEDULER_STATE,
// SAMPLER_STATE, GENERATOR_STATES and METADATA, or a state_dict; read_pt()
// reads either. They throw the errors of save_snapshot_file() and
// load_snapshot_file().
void write_pt(AtomicFile& file, const PickleValue& tree);
Snapshot read_pt(const InputFile& file);

// Returns the state_dict under `key` of the file's dict (for load_tensors()).
NamedTensors read_pt_entry(const InputFile& file, const std::string& key);

}  // namespace lockstep::internal

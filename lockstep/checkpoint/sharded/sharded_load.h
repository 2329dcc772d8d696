#pragma once

#include <optional>
#include <string>

#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "lockstep/checkpoint/training_state.h"

namespace lockstep::internal {

// load_snapshot() for a folder: one snapshot, a folder of snapshots, of which
// the newest is loaded that can be, or a folder of PyTorch's distributed
// checkpoint. Collective.
LoadedSnapshot load_from_folder(const std::string& path, TrainingState& state,
                                const LoadSnapshotOptions& options,
                                const Ranks& ranks);

// Opens what `path` names: a folder (a snapshot, a folder of snapshots, of
// which the newest counts, or weights), an index of Hugging Face's (*.json),
// or, if it shall be mapped, a safetensors file. Nothing if it is another kind
// of file, or if there is none.
std::optional<TensorFiles> open_weights(const std::string& path,
                                        bool mmap = false);

// Returns the prefix of the model's tensors: none in weights, and in a folder
// of PyTorch's that holds a bare state_dict. `module`, if not null: the one
// that has these names, which decides if both are possible.
std::string model_prefix(const TensorFiles& files,
                         const torch::nn::Module* module);

// Do for such files what load_snapshot_file(), load_tensors(), load_model() and
// verify_snapshot() do. Not collective.
Snapshot read_snapshot_folder(const TensorFiles& files);
NamedTensors read_weights(const TensorFiles& files);
IncompatibleKeys load_weights(const TensorFiles& files,
                              torch::nn::Module& module,
                              const LoadModelOptions& options);
void verify_tensor_files(const TensorFiles& files);

}  // namespace lockstep::internal

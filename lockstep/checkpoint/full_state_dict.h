#pragma once

#include <torch/nn/module.h>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

struct FullStateDictOptions {
  // The ranks that have the parts of the model. Null means the default group,
  // or this process alone if there is none.
  ProcessGroupPtr group{};
};

// Collective. Returns, on the group's first rank, the state_dict() of the whole
// model of which each rank's `module` has a part: parameters that are divided
// over ranks (FSDP, tensor parallelism) are put together, and the parameters of
// all stages of a pipeline are listed, in rank order. Returns nothing on the
// other ranks. As Python's get_model_state_dict(full_state_dict=True,
// cpu_offload=True) (PyTorch documentation,
// torch.distributed.checkpoint.state_dict).
//
//   auto whole = lockstep::full_state_dict(*model);
//   if (lockstep::get_rank() == 0) lockstep::save_tensors("model.pt", whole);
//
// The way back is load_state_dict() or load_model() on every rank: a parameter
// that is a part takes its part of a whole tensor.
//
// The tensors are on the CPU; one that the first rank has whole on the CPU
// shares its memory with the module. The parts are sent one after the other, so
// the first rank needs memory for the whole model and one part, the others for
// one part. Blocks until this rank's parts are sent. Buffers are those of the
// first rank that has them. Checksums of what several ranks have are compared
// before, as when a snapshot is saved.
//
// Throws std::invalid_argument, on every rank, if ranks disagree on the shape
// or dtype of a tensor, if their parts do not hold each element once, if
// replicas of a part have different values, if stages of a pipeline have
// different parameters or buffers of one name, or for a dtype that safetensors
// lacks; c10::DistBackendError if a message fails.
NamedTensors full_state_dict(const torch::nn::Module& module,
                             const FullStateDictOptions& options = {});

}  // namespace lockstep

#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// After torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook, and Lin
// et al., "Don't Use Large Mini-batches, Use Local SGD" (ICLR 2020); the form
// of hooks as in default_hooks.h.
namespace lockstep {

struct PostLocalSGDOptions {
  ProcessGroupPtr process_group{};  // none: the default group
  // The ranks that go on averaging gradients. None: those of one host, by
  // new_subgroups(LOCAL_WORLD_SIZE).
  ProcessGroupPtr subgroup{};
  int64_t start_localSGD_iter{0};
  // Whether the subgroup averages gradients at all.
  bool post_local_gradient_allreduce{true};
};

struct PostLocalSGDState {
  // Collective over the default group where it makes the subgroup; throws
  // std::invalid_argument if LOCAL_WORLD_SIZE is needed and not there, or
  // start_localSGD_iter is negative.
  explicit PostLocalSGDState(const PostLocalSGDOptions& options);

  PostLocalSGDOptions options;
  int64_t iter = 0;  // steps so far, until start_localSGD_iter
};

// Averages gradients over process_group in the first start_localSGD_iter steps,
// then over the subgroup only, or not at all: parameters are to be averaged now
// and then (model_averaging/averagers.h, whose warmup_steps is
// start_localSGD_iter).
CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);

}  // namespace lockstep

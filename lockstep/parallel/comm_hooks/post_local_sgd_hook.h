#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// The hook of torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook,
// and Lin et al., "Don't Use Large Mini-batches, Use Local SGD" (ICLR 2020). It
// is registered like the hooks of comm_hooks.h.
namespace lockstep {

// The arguments of Python's PostLocalSGDState.
struct PostLocalSGDOptions {
  // The ranks that average gradients in the first steps. Null means the default
  // group.
  ProcessGroupPtr process_group{};

  // The ranks that average gradients after them. Null means the ranks of one
  // host, by new_subgroups(LOCAL_WORLD_SIZE).
  ProcessGroupPtr subgroup{};

  // The number of first steps. Give some hundreds: parameters drift apart
  // fastest at the beginning.
  int64_t start_local_sgd_iter{0};

  // Whether the subgroup averages gradients at all. Set it to false if even
  // that costs too much; then only parameters are averaged.
  bool post_local_gradient_allreduce{true};
};

// An item of TrainingState::items, so that a resumed training does not begin
// with the first steps again.
struct PostLocalSGDState {
  // Collective over the default group if it makes the subgroup. Throws
  // std::invalid_argument if LOCAL_WORLD_SIZE is needed but not set, or if
  // start_local_sgd_iter is negative.
  explicit PostLocalSGDState(const PostLocalSGDOptions& options);

  std::map<std::string, int64_t> state_dict() const { return {{"iter", iter}}; }
  // Throws std::invalid_argument if there is no "iter".
  void load_state_dict(const std::map<std::string, int64_t>& state);

  PostLocalSGDOptions options;
  int64_t iter = 0;  // steps so far, until start_local_sgd_iter
};

// Averages gradients over process_group in the first start_local_sgd_iter
// steps; after them over the subgroup only, or not at all. Then the parameters
// must be averaged now and then (model_averaging/averagers.h, with warmup_steps
// equal to start_local_sgd_iter).
CommHook post_local_sgd_hook(std::shared_ptr<PostLocalSGDState> state);

}  // namespace lockstep

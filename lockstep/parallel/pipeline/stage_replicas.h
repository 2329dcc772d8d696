#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/ddp_state.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"

// The interface through which PipelineStage uses the wrappers that a stage may
// have.
namespace lockstep::internal {

// The joint work in a step of a stage and the same stage on other ranks, each
// in a pipeline of its own. Threads: one at a time.
class StageReplicas {
 public:
  virtual ~StageReplicas() = default;
  // Called before the first action of a step, or of an eval(). Collective over
  // groups().
  virtual void begin(bool /*training*/) {}
  // Called after every backward that adds to gradients.
  virtual void after_backward() {}
  // Called after the last action. Collective.
  virtual void finish(bool training) = 0;
  // Called instead of finish() if an exception ended the step.
  virtual void give_up() noexcept {}
  virtual std::vector<ProcessGroupPtr> groups() const = 0;
};

// After the last backward of a step, averages the gradients that backwards
// without the wrapper have accumulated: runs one backward of the wrapper that
// adds zeros to them. `state` must outlive the result. Throws
// std::invalid_argument with mixed_precision.
std::shared_ptr<StageReplicas> replicas_of(
    DdpState& state, std::shared_ptr<torch::nn::Module> module);
// Gathers the parameters, and divides the gradients after the last backward.
std::shared_ptr<StageReplicas> replicas_of(std::shared_ptr<ShardedUnit> unit);

// Runs one forward of the unit; `call` is that of its module.
std::vector<at::Tensor> forward_unit(
    const std::shared_ptr<ShardedUnit>& unit, std::vector<at::Tensor> inputs,
    const std::function<
        std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& call);

// Throws std::invalid_argument if a FullyShard has a parameter of `module`.
void require_no_units(int stage, const torch::nn::Module& module);

}  // namespace lockstep::internal

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "lockstep/parallel/pipeline/stage_forward.h"
#include "lockstep/parallel/pipeline/stage_replicas.h"

namespace lockstep {

// One stage of a pipeline: a module and its place. Its forward takes what the
// forward of the stage before returns: 1 to 4 tensors, or a std::vector of
// them; and returns tensors, alone or in a tuple, a vector or another type that
// ForwardResult knows (module/forward_result.h). The module is shared, not
// copied.
class PipelineStage {
 public:
  // `index`: 0 is the stage that gets the inputs. `module`: as for
  // DistributedDataParallel.
  template <typename Module>
  PipelineStage(int index, const Module& module)
      : PipelineStage(index, internal::ModulePointer<Module>::get(module),
                      Shared()) {
    internal::require_no_units(index, *module_);
  }

  // A stage of which several pipelines, over the ranks of the wrapper's group,
  // train replicas. The wrapper must outlive the stage. Micro-batches run on
  // the module itself, as under no_sync(). After the last backward of a step
  // one more backward of the wrapper, which adds zeros, averages what they have
  // accumulated: with every schedule, and with what else builds on the
  // wrapper's buckets, such as hooks and sharded optimizers. Its cost is one
  // pass over the gradients; averaging does not overlap with backward. What no
  // micro-batch of a step has used is unused for the wrapper: with
  // find_unused_parameters it keeps no gradient if no rank has used it, and
  // without it is an error that names the parameter. Throws
  // std::invalid_argument with DistributedDataParallelOptions::mixed_precision;
  // use Autocast in the module instead.
  template <typename Module>
  PipelineStage(int index, DistributedDataParallel<Module>& model)
      : PipelineStage(index, model.module(), Shared()) {
    replicas_ =
        internal::replicas_of(internal::WrapperAccess::state(model), module_);
  }

  // A stage whose parameters are divided over the ranks of the unit's group:
  // those that have the same stage in other pipelines (the mesh axis `shard`).
  // `unit` is the outermost unit of the stage; its module may contain others.
  // Schedules of all kinds give the numbers of one process, also those with
  // backwards in two parts (PyTorch issue 144530).
  //
  // A step gathers each unit once, before its first forward; the full
  // parameters stay until the end of the step, whatever reshard_after_forward
  // says. Each rank accumulates the full gradients of its micro-batches, as
  // under no_sync(), and they are reduced after the last backward. So each of N
  // ranks sends (N - 1) / N of the stage's parameters and of its gradients,
  // whatever the number of micro-batches; nothing, if the ranks share memory.
  // Divided are: parameters between steps, gradients after a step, and the
  // optimizer's state. While a step runs, a rank holds in addition the full
  // parameters of its stages (unless ranks share one copy) and their full
  // gradients, in the reduce_dtype of the unit's policy. A parameter that no
  // rank used keeps no gradient.
  //
  // The unit works by itself between steps. Under its no_sync() a step keeps
  // the full gradients, and the next step without it averages the sum. Throws
  // std::invalid_argument if another unit contains this one.
  template <typename Module>
  PipelineStage(int index, const FullyShard<Module>& unit)
      : PipelineStage(index, unit.ptr(), Shared()) {
    const auto& shared = internal::WrapperAccess::unit(unit);
    replicas_ = internal::replicas_of(shared);
    forward_ = [call = std::move(forward_),
                shared](const std::vector<at::Tensor>& x) {
      return internal::forward_unit(shared, x, call);
    };
  }

  int index() const { return index_; }
  torch::nn::Module& module() const { return *module_; }

  // Is called after the last backward of each step, when the gradients of this
  // stage are complete on this rank; with a DistributedDataParallel or a
  // FullyShard before they are averaged. For what reduces gradients in other
  // ways.
  std::function<void()> after_backward{};

 private:
  friend class Pipeline;

  struct Shared {};  // tells the constructor below from those above
  template <typename Impl>
  PipelineStage(int index, std::shared_ptr<Impl> module, Shared)
      : index_(index),
        module_(module),
        forward_(
            [module = std::move(module)](const std::vector<at::Tensor>& x) {
              return internal::forward_tensors(*module, x);
            }) {}

  int index_;
  std::shared_ptr<torch::nn::Module> module_;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>
      forward_;
  std::shared_ptr<internal::StageReplicas> replicas_;  // or null
};

}  // namespace lockstep

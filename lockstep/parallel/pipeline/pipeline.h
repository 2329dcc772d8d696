#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/required.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/pipeline/pipeline_stage.h"
#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep {

// Computes the loss of one micro-batch, a tensor with one element, from what
// the last stage returns and the targets of the micro-batch. Made from any
// function of (tensor, tensor), or of (vector of tensors, tensor) if the last
// stage returns several.
class PipelineLoss {
 public:
  PipelineLoss() = default;
  template <typename Function>
    requires(!std::is_same_v<std::remove_cvref_t<Function>, PipelineLoss>)
  PipelineLoss(Function function) {  // implicit: options name it alone
    if constexpr (requires(at::Tensor t) { function(t, t); }) {
      call_ = [function = std::move(function)](
                  const std::vector<at::Tensor>& outputs,
                  const at::Tensor& target) -> at::Tensor {
        return function(outputs.at(0), target);
      };
    } else {
      call_ = std::move(function);
    }
  }
  explicit operator bool() const { return static_cast<bool>(call_); }
  at::Tensor operator()(const std::vector<at::Tensor>& outputs,
                        const at::Tensor& target) const {
    return call_(outputs, target);
  }

 private:
  std::function<at::Tensor(const std::vector<at::Tensor>&, const at::Tensor&)>
      call_;
};

// One weight that several stages use, such as the embedding of a language model
// whose last stage uses it again. The parameters have one shape and dtype.
struct TiedWeight {
  struct Holder {
    int stage = 0;
    std::string parameter{};  // its name in the stage's module
  };
  std::vector<Holder> holders{};  // at least two
};

struct PipelineOptions {
  // The order of the actions (schedules.h): for as many ranks as the group
  // has. It is checked (schedule_check.h) before anything runs.
  Required<PipelineSchedule> schedule;

  // May be left out for eval() without losses only.
  PipelineLoss loss{};

  // For a loss over fewer elements than rows, as with ignored targets: by what
  // the loss is divided, for the targets of a whole batch. `loss` then returns
  // the sum over a micro-batch, whose weight is 1 / count, so that a
  // micro-batch counts by its elements and not by its rows, and one of ignored
  // targets alone adds 0 instead of NaN. So does a whole batch of them, of
  // count 0. Called on the last stage's rank at the beginning of step(), and of
  // eval() with a target.
  //
  //   .loss = [](auto& y, auto& t) { return cross_entropy_sum(y, t, -100); },
  //   .loss_count = [](auto& t) { return t.ne(-100).sum().item<double>(); }
  std::function<double(const at::Tensor& target)> loss_count{};

  // Whether gradients are those of the mean over the rows of the batch: each
  // micro-batch counts with its part of the rows, which is 1 / micro-batches if
  // they are of one size, as in Python. Set it to false if the loss sums over
  // rows.
  bool scale_gradients{true};

  // Whether step() returns the outputs of the last stage; set it to false to
  // save their memory.
  bool return_outputs{true};

  // The same on all ranks. All holders get the first holder's values, and after
  // each step() all have the sum of the holders' gradients, so that equal
  // optimizers keep them equal. In norms the weight counts once
  // (comm/tensor_layout.h).
  std::vector<TiedWeight> tied_weights{};

  // The ranks of the pipeline. Null means the default group.
  ProcessGroupPtr group{};
};

// The results on the rank of the last stage; empty on the others.
struct PipelineResult {
  // The outputs of the last stage, for the whole batch (joined along dimension
  // 0), without graphs.
  std::vector<at::Tensor> outputs{};
  // The loss of each micro-batch, unscaled, without graphs.
  std::vector<at::Tensor> losses{};
  // Their mean, weighted by rows (PipelineOptions::scale_gradients), or sum, or
  // with loss_count their sum divided by the count; undefined on other ranks,
  // or if there is no target.
  at::Tensor loss{};
};

// Runs a model that is divided into stages over the ranks of a group, several
// micro-batches at a time (PyTorch documentation, "Pipeline Parallelism":
// torch.distributed.pipelining).
//
//   auto stage = lockstep::stage_of(model, {0, 4}, group->rank());
//   lockstep::Pipeline pipeline(
//       {{group->rank(), stage}},
//       {.schedule = lockstep::schedule_1f1b(2, 8), .loss = mse});
//   torch::optim::SGD optimizer(stage->parameters(), 0.1);
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     auto result = pipeline.step(batch.data, batch.target);
//     optimizer.step();
//   }
//
// step() divides the batch along dimension 0 into the schedule's micro-batches,
// as torch::tensor_split() does: sizes differ by one row at most. All ranks
// call it in the same order; inputs are used on the rank of stage 0 and the
// target on that of the last stage, and other ranks may pass anything or
// nothing. When it returns, gradients are accumulated in .grad as by
// backward(), equal on each rank to those of one process.
//
// Shapes. The shapes of a stage's outputs depend only on the shapes of its
// inputs. When a stage sends for the first time for inputs of new shapes, it
// sends the number, shapes and dtypes of its tensors before them, and whether
// they require grad; batches and micro-batches of any size may follow each
// other. The same holds if the requires_grad of inputs or of parameters has
// changed, so stages may be frozen and unfrozen between steps. If outputs
// change although none of this has, step() throws std::runtime_error.
//
// Unused tensors. A tensor that no stage after uses brings no gradient, as in
// one process: parameters that only it depends on keep none.
//
// Layouts. The constructor attaches to each parameter and buffer of the stages
// that it is whole, and that the ranks of the group have different ones
// (comm/tensor_layout.h): clipping and snapshots follow it. Parameters that the
// loss has, but no stage, get the same in the first step(), or are refused
// (std::invalid_argument) if the last stage has replicas, since nothing would
// average their gradients: register them in its module. A pipeline that is
// made again over the same stages replaces what the one before has attached.
// Snapshots and full_state_dict() need parameters of different names on
// different ranks, except for tied weights, and buffers of different names,
// except for those of equal values: give modules the names that they have in
// the whole model, as stage_of() does.
//
// Communication. One small all-gather at the beginning of step() and eval(),
// then one message for each boundary between ranks, micro-batch, direction and
// tensor (isend() and irecv(), with tags), and one of a number for each
// gradient before the gradients. Sends and receives are posted in the order of
// the schedule, in which no rank waits for ever even if sends block.
//
// Errors. A mistake in the arguments of step() on any rank is thrown on every
// rank (std::invalid_argument, with the rank), and the group can be used
// further. If a stage or the loss throws, this rank leaves the group
// (ProcessGroup::abort()), and the groups of its stages'
// DistributedDataParallel or FullyShard, and throws the same; all other ranks
// of the group, and of replicas of the pipeline, throw c10::DistBackendError
// that names the rank, the stage, the micro-batch and the words of the
// exception. What the pipeline itself finds wrong in a result of a stage or of
// the loss (one that does not require grad, for example) is
// std::invalid_argument on this rank, with the same text. If a rank dies, all
// others throw c10::DistBackendError that names it. The groups are of no use
// then.
//
// Threads: use from one thread. Blocking: step() and eval() wait for the other
// ranks, each time for the group's timeout at most.
class Pipeline {
 public:
  // Collective. `stages`: those that the schedule gives this rank, in any
  // order. Throws std::invalid_argument on every rank, with the rank, if they
  // are not, if schedules or tied weights differ between ranks, or if a tied
  // weight does not exist or has another shape than the first.
  Pipeline(std::vector<PipelineStage> stages, PipelineOptions options);
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;
  ~Pipeline();

  // Trains on one batch: forward and backward of all micro-batches.
  PipelineResult step(at::TensorList inputs = {},
                      const at::Tensor& target = {});

  // Computes outputs, and losses if the target is given on the last stage's
  // rank, without gradients: the forwards of the schedule alone. Modules stay
  // in the mode (train(), eval()) in which they are.
  PipelineResult eval(at::TensorList inputs = {},
                      const at::Tensor& target = {});

  // Returns a parameter without elements. If the stages of this rank have no
  // parameters, make the optimizer from it: for GradScaler (amp/grad_scaler.h)
  // and clip_grad_norm_() (amp/clip_grad.h), in which every rank of the
  // pipeline takes part. Snapshots leave it out.
  //
  //   auto parameters = stage->parameters();
  //   if (parameters.empty()) parameters = {pipeline.empty_parameter()};
  //   torch::optim::SGD optimizer(parameters, 0.1);
  at::Tensor empty_parameter() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep

#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/parallel/model_averaging/averagers.h"

namespace lockstep {

// An optimizer that steps another optimizer and then, in the averager's steps,
// averages parameters over the ranks; it follows
// torch.distributed.optim.PostLocalSGDOptimizer (PyTorch documentation). For
// DistributedDataParallel with post_local_sgd_hook().
//
//   auto sgd = std::make_shared<torch::optim::SGD>(model->parameters(), 0.1);
//   auto averager = std::make_shared<PeriodicModelAverager>(
//       PeriodicModelAveragerOptions{.period = 4, .warmup_steps = 100});
//   PostLocalSGDOptimizer optimizer(sgd, averager);
//
// Learning rates may be set here (as schedulers do) or in optim(): a step uses
// the rate that was changed, and throws std::invalid_argument if both sides
// were set to different rates. Other hyperparameters, and all state, are those
// of optim().
//
// Give this optimizer itself to TrainingState, state_dict() and
// load_state_dict(), not optim(): they hold what optim() has, with the learning
// rates of both sides, and averager().step. A state without that step, as
// optim() alone has it, sets it to 0, with a warning as in Python. One thread
// at a time.
class PostLocalSGDOptimizer final : public torch::optim::Optimizer,
                                    public internal::OptimizerWrapper {
 public:
  // Throws std::invalid_argument if one is null, or if `optim` has no parameter
  // groups.
  PostLocalSGDOptimizer(std::shared_ptr<torch::optim::Optimizer> optim,
                        std::shared_ptr<ModelAverager> averager);

  // Adds the group here and to optim(), each parameter once. Hides LibTorch's
  // function, which is not virtual: do not add groups through a reference to
  // the base class, nor to optim().
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Collective in the steps in which the averager averages. Throws
  // std::invalid_argument, before anything is changed, if optim() has other
  // groups.
  at::Tensor step(LossClosure closure = nullptr) override;

  torch::optim::Optimizer& optim() { return *optim_; }
  ModelAverager& averager() { return *averager_; }

  // Writes and reads LibTorch's archive of optim() with the averager's step
  // added under "step".
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // For snapshots.
  torch::optim::Optimizer& wrapped() const override;
  int64_t averager_step() const override { return averager_->step; }
  void take_loaded(std::optional<int64_t> averager_step) override;

 private:
  void require_same_groups() const;
  void take_rates();

  std::shared_ptr<torch::optim::Optimizer> optim_;
  std::shared_ptr<ModelAverager> averager_;
  // Each group's rate when both sides last agreed.
  mutable std::vector<double> learning_rates_;
  bool has_learning_rate_ = true;
};

}  // namespace lockstep

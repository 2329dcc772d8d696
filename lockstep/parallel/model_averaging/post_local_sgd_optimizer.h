#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

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
// the rate that was changed, and this optimizer's if both were. Other
// hyperparameters, and all state, are those of optim(): save
// state_dict(optimizer.optim()) and averager().step. One thread at a time.
class PostLocalSGDOptimizer final : public torch::optim::Optimizer {
 public:
  // Throws std::invalid_argument if one is null, or if `optim` has no parameter
  // groups.
  PostLocalSGDOptimizer(std::shared_ptr<torch::optim::Optimizer> optim,
                        std::shared_ptr<ModelAverager> averager);

  // Collective in the steps in which the averager averages.
  at::Tensor step(LossClosure closure = nullptr) override;

  torch::optim::Optimizer& optim() { return *optim_; }
  ModelAverager& averager() { return *averager_; }

  // Writes and reads LibTorch's archive of optim() with the averager's step
  // added under "step". load() sets the step to 0 if the archive lacks it, as
  // one that optim() alone has written.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void agree_on_learning_rates();

  std::shared_ptr<torch::optim::Optimizer> optim_;
  std::shared_ptr<ModelAverager> averager_;
  std::vector<double> learning_rates_;  // by group, when both sides last agreed
  bool has_learning_rate_ = true;
};

}  // namespace lockstep

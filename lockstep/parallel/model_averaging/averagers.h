#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

// After torch.distributed.algorithms.model_averaging (PyTorch source,
// averagers.py and hierarchical_model_averager.py).
namespace lockstep {

// Averages parameters over ranks that train for themselves in between
// (post_localSGD_hook()), every so many steps. One thread at a time.
class ModelAverager {
 public:
  virtual ~ModelAverager() = default;

  // Behind each step of the optimizer. Collective in the steps in which it
  // averages: the parameters that have a gradient, which must be the same on
  // all ranks, in their memory, each once, as one flat tensor. Blocking; errors
  // are those of all_reduce().
  void average_parameters(const std::vector<at::Tensor>& params);
  void average_parameters(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

  // Calls of average_parameters() so far. To be restored with a snapshot.
  int64_t step = 0;

 protected:
  // Whom to average with in this step; nullptr: nobody.
  virtual ProcessGroupPtr group_of_step() const = 0;

 private:
  void average(const std::vector<at::Tensor>& with_gradient);
};

struct PeriodicModelAveragerOptions {
  // Steps from one averaging to the next. Of 1 there is no use: averaging
  // gradients costs less.
  int64_t period{4};
  // The steps before the first, in which gradients are averaged.
  int64_t warmup_steps{0};
  ProcessGroupPtr process_group{};  // none: the default group
};

// Averages in step warmup_steps, counted from 0, and each period-th behind it.
class PeriodicModelAverager final : public ModelAverager {
 public:
  // Throws std::invalid_argument for a number out of range.
  explicit PeriodicModelAverager(
      const PeriodicModelAveragerOptions& options = {});

 protected:
  ProcessGroupPtr group_of_step() const override;

 private:
  PeriodicModelAveragerOptions options_;
};

struct HierarchicalModelAveragerOptions {
  // Period and size of the group that averages then, both rising; the last
  // size is that of process_group: {{4, 8}, {16, 16}}.
  std::vector<std::pair<int64_t, int>> period_group_size_dict{};
  int64_t warmup_steps{0};
  ProcessGroupPtr process_group{};  // none: the default group
};

// Averages, from step warmup_steps on, over the group of the largest period
// that divides the step's number, if there is one. A group of size k holds k
// neighbours in rank.
class HierarchicalModelAverager final : public ModelAverager {
 public:
  // Collective over process_group: makes the groups. Throws
  // std::invalid_argument for periods or sizes that are not as above, or sizes
  // of which that of process_group is no multiple.
  explicit HierarchicalModelAverager(
      const HierarchicalModelAveragerOptions& options);

 protected:
  ProcessGroupPtr group_of_step() const override;

 private:
  int64_t warmup_steps_;
  std::vector<std::pair<int64_t, ProcessGroupPtr>> groups_;  // by period
};

}  // namespace lockstep

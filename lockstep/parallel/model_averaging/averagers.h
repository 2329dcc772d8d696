#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/required.h"
#include "lockstep/comm/process_group.h"

// These classes follow torch.distributed.algorithms.model_averaging (PyTorch
// source, averagers.py and hierarchical_model_averager.py).
namespace lockstep {

// Averages parameters, every so many steps, over ranks that train independently
// in between (post_local_sgd_hook()). One thread at a time.
class ModelAverager {
 public:
  virtual ~ModelAverager() = default;

  // Call it after each step of the optimizer. In the steps in which it averages
  // it is collective: it averages in place the parameters that have a gradient,
  // each once, as one flat tensor; they must be the same on all ranks.
  // Blocking; throws the errors of all_reduce(), and std::invalid_argument for
  // a parameter of which these ranks have different parts (set_placement()).
  void average_parameters(at::TensorList params);
  void average_parameters(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

  // Calls of average_parameters() so far, which snapshots must have: those of a
  // PostLocalSGDOptimizer do; otherwise give the averager to
  // TrainingState::items.
  int64_t step = 0;

  std::map<std::string, int64_t> state_dict() const { return {{"step", step}}; }
  // Throws std::invalid_argument if there is no "step".
  void load_state_dict(const std::map<std::string, int64_t>& state);

 protected:
  // Returns the group to average over in this step, or null for no averaging.
  virtual ProcessGroupPtr group_of_step() const = 0;

 private:
  void average(const std::vector<at::Tensor>& with_gradient);
};

struct PeriodicModelAveragerOptions {
  // Steps from one averaging to the next. A larger number sends less, and lets
  // the ranks drift further apart. 1 is useless: averaging gradients costs
  // less.
  int64_t period{4};

  // The number of steps before the first averaging; gradients are averaged in
  // them. Give start_local_sgd_iter of the hook.
  int64_t warmup_steps{0};

  // The ranks that average. Null means the default group.
  ProcessGroupPtr process_group{};
};

// Averages in step warmup_steps, counted from 0, and in each period-th step
// after it.
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
  // Pairs of a period and the size of the groups that average at that period,
  // both rising. The last size is that of process_group. Example:
  // {{4, 8}, {16, 16}}.
  Required<std::vector<std::pair<int64_t, int>>> period_group_size_dict;

  // No averaging before this step. Give start_local_sgd_iter of the hook.
  int64_t warmup_steps{0};

  // The ranks that average. Null means the default group.
  ProcessGroupPtr process_group{};
};

// From step warmup_steps on, averages over the group with the largest period
// that divides the step's number, if there is one. A group of size k holds k
// ranks with consecutive numbers.
class HierarchicalModelAverager final : public ModelAverager {
 public:
  // Collective over process_group: makes the groups. Throws
  // std::invalid_argument for periods or sizes that are not as described above,
  // and for sizes that do not divide the size of process_group.
  explicit HierarchicalModelAverager(
      const HierarchicalModelAveragerOptions& options);

 protected:
  ProcessGroupPtr group_of_step() const override;

 private:
  int64_t warmup_steps_;
  std::vector<std::pair<int64_t, ProcessGroupPtr>> groups_;  // by period
};

}  // namespace lockstep

#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/adam.h"
#include "lockstep/optim/lr_scheduler/lr_schedulers.h"
#include "lockstep/optim/sgd.h"

// Schedulers that the tests of this folder step, by name; scheduler_peer.py
// makes the same in Python.
namespace lockstep::internal::testing {

constexpr int kSteps = 60;
constexpr int kMiddle = 25;  // where a state is saved

// The interface of all schedulers, also of ReduceLROnPlateau.
struct Scheduled {
  std::unique_ptr<ResumableScheduler> scheduler;
  std::function<void(int step)> step;
  std::function<std::vector<double>()> last_lr;
};

// A model with two parameter groups: weight 0.1, bias 0.02. For a third group,
// which is added later, there is `extra`.
struct Trained {
  explicit Trained(bool adam);
  void add_group() const;
  // Returns the learning rate of each group, and its momentum or beta1.
  std::vector<double> rates() const;
  std::vector<double> momenta() const;

  torch::nn::Linear model{2, 1};
  at::Tensor extra = torch::zeros({3}).requires_grad_();
  bool is_adam;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

struct SchedulerCase {
  std::string name;
  bool adam = false;
  std::function<Scheduled(torch::optim::Optimizer&)> make;
  // The step before which a group is added; -1 if none is.
  int adds_group_at = -1;
};

const std::vector<SchedulerCase>& scheduler_cases();

}  // namespace lockstep::internal::testing

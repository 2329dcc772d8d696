#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/state/state_tree.h"

namespace lockstep::internal {

// An optimizer's parameter groups as schedulers use them: their learning rates
// and momenta, and the named numbers that Python's schedulers keep in
// optimizer.param_groups, for which LibTorch's groups have no place
// ("initial_lr", "max_lr", "swa_lr"). The parts of one scheduler share an
// object of this class, so that they find each other's numbers as in Python.
class SchedulerGroups {
 public:
  using Values = std::map<std::string, double>;

  // `optimizer` must outlive this object. Groups may be added to it later.
  explicit SchedulerGroups(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer) {}

  size_t size() const { return optimizer_.param_groups().size(); }

  double lr(size_t group) const;
  std::vector<double> lrs() const;
  void set_lr(size_t group, double lr) const;

  // Returns the group's learning rate before the first scheduler changed it:
  // the number "initial_lr", which is set to the present rate if there is none.
  double initial_lr(size_t group);

  Values& values(size_t group);
  double value(size_t group, const std::string& name);

  // Throws std::invalid_argument, naming `scheduler`, if the optimizer has
  // neither a momentum (SGD, RMSprop) nor a beta1 (Adam, AdamW).
  void require_momentum(const char* scheduler) const;
  // Returns whether set_momentum() sets the first of Adam's betas.
  bool has_beta1() const;
  void set_momentum(size_t group, double momentum) const;

  // The named numbers, by group: `param_groups` of ResumableScheduler.
  StateTree state() const;
  // Returns a function that takes over those in `state`, which is such a list
  // or nullptr, and does not throw. Other numbers in it are ignored. Throws
  // std::invalid_argument, naming `scheduler`, for anything else and for more
  // groups than there are.
  std::function<void()> prepare_load(const StateTree* state,
                                     const char* scheduler);

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<Values> values_;
};

using SchedulerGroupsPtr = std::shared_ptr<SchedulerGroups>;

}  // namespace lockstep::internal

#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

// State and hyperparameters of `optimizer` as its Python namesake's
// state_dict() has them: Python's load_state_dict() takes them as they are.
// For SGD, Adam, AdamW, RMSprop and Adagrad and what is derived from these;
// throws std::invalid_argument for any other (LBFGS keeps a history that has
// no place in a snapshot yet). A parameter that a group names twice has one
// number, that of a Python program, whose module names it once. State tensors
// share their memory with the optimizer: write them before the next step.
OptimizerState capture_optimizer(const torch::optim::Optimizer& optimizer);
// Throws std::invalid_argument where capture_optimizer() would.
void check_can_capture(const torch::optim::Optimizer& optimizer);

// The reverse, from our own state or from Python's. Hyperparameters are
// restored, too, as load_state_dict() does; those that LibTorch lacks and that
// only choose an implementation (`foreach`, `fused`, `capturable`) are
// ignored, `maximize=True` is refused. State tensors are copied, in the dtype
// and to the device of their parameter; those the optimizer had are dropped.
//
// Throws std::invalid_argument, before anything is changed, if groups or
// parameters differ in number, a state tensor has not its parameter's shape,
// or the state is that of another kind of optimizer.
void restore_optimizer(torch::optim::Optimizer& optimizer,
                       const OptimizerState& state);

// restore_optimizer() in two parts, so that several things can be checked
// before the first is changed: everything that may throw is in the
// constructor.
class OptimizerRestore {
 public:
  // `optimizer` must outlive this object and keep its parameters.
  OptimizerRestore(torch::optim::Optimizer& optimizer,
                   const OptimizerState& state);
  ~OptimizerRestore();
  OptimizerRestore(const OptimizerRestore&) = delete;
  OptimizerRestore& operator=(const OptimizerRestore&) = delete;

  void apply();

 private:
  struct Prepared;
  torch::optim::Optimizer& optimizer_;
  std::unique_ptr<Prepared> prepared_;
};

}  // namespace lockstep

#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

// Returns state and hyperparameters of `optimizer` as the state_dict() of the
// Python optimizer of the same name: Python's load_state_dict() accepts them.
// Works for SGD, Adam, AdamW, RMSprop, Adagrad and classes derived from these;
// throws std::invalid_argument for any other (LBFGS keeps a history that has no
// place in a snapshot yet). A parameter that a group names twice has one
// number, as in a Python program, whose module names it once. State tensors
// share their memory with the optimizer: write them before the next step.
OptimizerState capture_optimizer(const torch::optim::Optimizer& optimizer);
// Throws std::invalid_argument if capture_optimizer() would.
void check_can_capture(const torch::optim::Optimizer& optimizer);

// Restores a state that capture_optimizer() or Python made. Hyperparameters are
// restored, too, as load_state_dict() does; those that LibTorch lacks and that
// only choose an implementation (`foreach`, `fused`, `capturable`) are ignored,
// and `maximize=True` is refused. State tensors are copied, with the dtype and
// to the device of their parameter; the optimizer's earlier state is dropped.
//
// Throws std::invalid_argument, before anything is changed, if groups or
// parameters differ in number, if a state tensor does not have its parameter's
// shape, or if the state belongs to another kind of optimizer.
void restore_optimizer(torch::optim::Optimizer& optimizer,
                       const OptimizerState& state);

// restore_optimizer() in two steps, so that a caller can check several things
// before it changes the first: the constructor makes all checks and may throw,
// apply() does not throw for a wrong state.
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

#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/snapshot.h"

// state_dict() and load_state_dict() (module_state.h, optimizer_state.h) in
// steps, so that a caller can check several things before it changes the first.
namespace lockstep::internal {

// Throws what load_state_dict() would throw, and returns what it would return.
IncompatibleKeys check_state_dict(const torch::nn::Module& module,
                                  const NamedTensors& state,
                                  const LoadStateDictOptions& options = {});

// Throws std::invalid_argument if state_dict() would.
void require_state_dict(const torch::optim::Optimizer& optimizer);

// load_state_dict() of an optimizer: the constructor makes all checks and may
// throw, apply() does not throw for a wrong state.
class OptimizerLoad {
 public:
  // `optimizer` must outlive this object and keep its parameters.
  OptimizerLoad(torch::optim::Optimizer& optimizer,
                const OptimizerState& state);
  ~OptimizerLoad();
  OptimizerLoad(const OptimizerLoad&) = delete;
  OptimizerLoad& operator=(const OptimizerLoad&) = delete;

  void apply();

 private:
  struct Prepared;
  torch::optim::Optimizer& optimizer_;
  std::unique_ptr<Prepared> prepared_;
};

}  // namespace lockstep::internal

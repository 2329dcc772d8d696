#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>

namespace lockstep::internal {

// The interface of a torch::optim::Optimizer that steps another one, which has
// the same parameter groups (PostLocalSGDOptimizer), for snapshots: they hold
// what the other one has.
class OptimizerWrapper {
 public:
  // Returns the other optimizer, with the learning rates that were set here.
  // Throws std::invalid_argument if the two cannot agree.
  virtual torch::optim::Optimizer& wrapped() const = 0;

  // Returns how many steps the averager has counted.
  virtual int64_t averager_step() const = 0;

  // Takes over the learning rates of wrapped(), into which a state was loaded,
  // and the averager's step, which is 0 if the state has none.
  virtual void take_loaded(std::optional<int64_t> averager_step) = 0;

 protected:
  ~OptimizerWrapper() = default;
};

// Whether ranks step by themselves between averagings of the parameters, so
// that their states differ. Snapshots have that of the first rank.
inline bool has_state_of_each_rank(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const OptimizerWrapper*>(&optimizer) != nullptr;
}

}  // namespace lockstep::internal

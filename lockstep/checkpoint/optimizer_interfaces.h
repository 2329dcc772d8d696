#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/state/box.h"

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

// A state that was checked against an optimizer and is ready to be taken over.
class PreparedOptimizer {
 public:
  virtual ~PreparedOptimizer() = default;

  // Replaces state and hyperparameters of the optimizer. Does not throw for a
  // wrong state.
  virtual void apply() = 0;
};

// The interface of a torch::optim::Optimizer whose state is divided over the
// ranks (ZeroRedundancyOptimizer), for snapshots that each rank writes its part
// of.
class OptimizerShards {
 public:
  // The part of a parameter whose state this rank has.
  struct Part {
    int64_t parameter = 0;  // its number, counted through all groups
    // Whether the part is the whole parameter, in its shape. Otherwise its
    // state has one dimension: the elements `range` in memory order.
    bool whole = true;
    Range range{0, 0};
  };
  struct State {
    std::vector<at::Tensor> parameters;  // all, by number
    // Hyperparameters and numbers of the parameters; without state.
    OptimizerState groups;
    std::vector<Part> parts;
    // local.state[i] is the state of parts[i]; without groups. Tensors share
    // their memory with the optimizer.
    OptimizerState local;
    // Whether the ranks' states differ, of which the first rank's is saved.
    bool of_first_rank = false;
  };

  // Returns what this rank has. Waits until all ranks have ended their steps.
  // Collective if a parameter group was added since the last step. Throws
  // std::invalid_argument for an optimizer that snapshots cannot hold.
  virtual State shards() = 0;

  // Checks a state to be loaded: groups with the hyperparameters, and the state
  // by part. The optimizer takes over the tensors themselves if they have the
  // dtype, device and layout of the part; otherwise copies. Throws
  // std::invalid_argument, before anything is changed. Not collective. The
  // optimizer must outlive the result, and keep its groups.
  virtual std::unique_ptr<PreparedOptimizer> prepare_load(
      const OptimizerState& groups, const OptimizerState& local) = 0;

 protected:
  ~OptimizerShards() = default;
};

}  // namespace lockstep::internal

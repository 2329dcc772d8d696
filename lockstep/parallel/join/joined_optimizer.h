#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/join/join.h"

namespace lockstep {

// Takes part in a join() for an optimizer that every rank keeps whole:
//
//   torch::optim::Adam optimizer(net->parameters(), 1e-3);
//   JoinedOptimizer joined(optimizer);
//   join({&model.joinable(), &joined}, [&] { ... });
//
// A rank that has no more inputs does not step, so its moments get old, and
// after the join equal gradients would change its parameters differently. At
// the end of the join this class gives all ranks the state and hyperparameters
// (including the learning rate) of the optimizer on the rank that trained
// longest, whose parameters DistributedDataParallel gives them. It communicates
// nothing during an iteration.
//
// Works for the optimizers whose state state_dict() (optimizer_state.h) knows:
// SGD, Adam, AdamW, RMSprop, Adagrad and classes derived from them, such as
// those of lockstep::optim. A sharded optimizer is a Joinable itself.
// Schedulers and a GradScaler have state of their own, which stays unchanged on
// each rank.
//
// Use from one thread. The constructor and the end of the join are collective
// and block.
class JoinedOptimizer final : public Joinable {
 public:
  // `process_group`: the group of the other joinables; null means the default
  // group. `optimizer` must outlive this object. Throws std::invalid_argument
  // for another kind of optimizer, and on all ranks if the ranks' optimizers
  // differ in groups, shapes or dtypes of parameters, or have different parts
  // of one (set_placement()).
  explicit JoinedOptimizer(torch::optim::Optimizer& optimizer,
                           ProcessGroupPtr process_group = {});

  const ProcessGroupPtr& join_process_group() const override { return group_; }
  void shadow(const JoinIteration&, const JoinOptions&) override {}
  void after_join(int last_joiner) override;

 private:
  torch::optim::Optimizer& optimizer_;
  ProcessGroupPtr group_;
};

}  // namespace lockstep

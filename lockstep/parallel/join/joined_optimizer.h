#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/join/join.h"

namespace lockstep {

// Stands in a join() for an optimizer that every rank keeps whole:
//
//   torch::optim::Adam optimizer(net->parameters(), 1e-3);
//   JoinedOptimizer joined(optimizer);
//   join({&model.joinable(), &joined}, [&] { ... });
//
// A rank that has no more inputs does not step, so its moments get old, and
// after the join equal gradients would lead to other parameters there. This
// gives all ranks state and hyperparameters (the learning rate, too) of the
// optimizer of the rank that trained longest, whose parameters
// DistributedDataParallel gives them. Nothing is communicated in an iteration.
//
// For the kinds that capture_optimizer() knows: SGD, Adam, AdamW, RMSprop,
// Adagrad and what is derived from them, as lockstep::optim. A sharded
// optimizer is itself joinable. Schedulers and a GradScaler have state of their
// own, which stays as it is on each rank.
//
// Use from one thread. Collective and blocking: the constructor, and the end of
// the join.
class JoinedOptimizer final : public Joinable {
 public:
  // `process_group`: that of the other joinables; none: the default group.
  // `optimizer` must outlive this object. Throws std::invalid_argument for an
  // optimizer of another kind, and on all ranks if the ranks' optimizers differ
  // in groups, shapes or dtypes of parameters.
  explicit JoinedOptimizer(torch::optim::Optimizer& optimizer,
                           ProcessGroupPtr process_group = {});

  const ProcessGroupPtr& join_process_group() const override { return group_; }
  void shadow(const JoinRound&, const JoinOptions&) override {}
  void after_join(int last_joiner) override;

 private:
  torch::optim::Optimizer& optimizer_;
  ProcessGroupPtr group_;
};

}  // namespace lockstep

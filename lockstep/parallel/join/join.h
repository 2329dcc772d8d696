#pragma once

#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

// Training with uneven inputs: ranks that have no more data shadow the
// communication of those that have. It follows
// torch.distributed.algorithms.Join (PyTorch documentation, "Generic Join
// Context Manager").
namespace lockstep {

// The same on all ranks.
struct JoinOptions {
  // ---- Behaviour ----

  // Whether gradients are divided by the group's size at the end, too, so that
  // each sample weighs the same, or by the number of ranks that still have
  // inputs, so that the last samples weigh more. Set it to false if the ranks
  // have very different numbers of inputs.
  bool divide_by_initial_world_size{true};

  // Instead of shadowing, throws std::runtime_error on every rank as soon as
  // one has no more inputs: on that rank after its body, on the others at the
  // start of their next iteration. The message names the rank that ran out. Set
  // it to true if uneven inputs are a mistake.
  bool throw_on_early_termination{false};

  // ---- Performance ----

  // Whether join() does anything but run the body. Set it to false if inputs
  // are known to be even: nothing is exchanged then.
  bool enable{true};
};

// The work of the ranks in one iteration. The same on all ranks.
struct JoinIteration {
  std::vector<int> active{};  // ranks that have inputs, ascending
  bool trains{false};         // whether forward runs with grad
  bool synchronizes{false};   // whether gradients are averaged
};

class Join;

// The interface of an object that communicates once in each iteration, and can
// shadow this communication on a rank without inputs.
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;
  virtual ~Joinable() = default;

  virtual const ProcessGroupPtr& join_process_group() const = 0;
  // Called on all ranks when the join begins, before any iteration: ranks
  // without inputs make none in which they could follow a change. Collective.
  virtual void before_join() {}
  // Does on a rank that has joined what the active ranks communicate in one
  // iteration.
  virtual void shadow(const JoinIteration& iteration,
                      const JoinOptions& options) = 0;
  // Called when all ranks have joined. `last_joiner`: the rank of the group
  // that trained longest (of several the highest).
  virtual void after_join(int last_joiner) = 0;

 protected:
  // Returns the join in which this takes part; null if none is running.
  Join* current_join() const { return join_; }

 private:
  friend class Join;
  Join* join_ = nullptr;
};

// One join; programs use join() below.
class Join {
 public:
  // Collective. Throws std::invalid_argument if there are no joinables, if one
  // is null or in a join already, or if they belong to several groups.
  Join(std::vector<Joinable*> joinables, const JoinOptions& options);
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  ~Join();

  // Collective. A joinable calls this before it communicates in an iteration.
  // Only the call of the first joinable communicates; the others get its
  // result. Throws std::logic_error if the first has not called yet.
  const JoinIteration& begin_iteration(const Joinable& joinable,
                                       bool synchronizes, bool trains = true);
  const JoinOptions& options() const { return options_; }
  size_t joinables() const { return joinables_.size(); }

  // Shadows the other ranks until all have come here. Collective.
  void finish();

 private:
  // `mine`: 0: joined; 1: active; 2: active with grad; 3: also averages
  // gradients.
  JoinIteration exchange(int mine);

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  ProcessGroupPtr group_;
  JoinIteration iteration_{};
};

// Runs `body`, the training loop of this rank, in which ranks may do different
// numbers of iterations. Returns when all ranks have ended theirs; then all
// have the parameters and buffers of the rank that trained longest.
//
// A rank without inputs does not step. So if each rank keeps the whole state of
// an optimizer (moments, step counts), that rank's state gets old, and replicas
// would drift apart after the join, without an error. Name a JoinedOptimizer
// (joined_optimizer.h) for each optimizer that has state: all except SGD
// without momentum. A sharded optimizer is named itself. Schedulers and a
// GradScaler have state, too: step schedulers outside of the body, and see
// docs/zero.md.
//
// Ranks without inputs do not take part in anything else that the others
// communicate in an iteration. So a sharded optimizer refuses clipping and
// unscaling, which are collective.
//
// Each iteration begins when the first joinable first communicates: a
// DistributedDataParallel in forward, so that under the join every forward
// counts as an iteration; a sharded optimizer made from parameters in step().
// Blocking: as the collectives are. An exception from `body` passes through,
// and the other ranks wait for this rank until their deadline.
//
//   join({&ddp.joinable(), &optimizer}, [&] {
//     for (auto& batch : loader) ...
//   });
template <typename Body>
void join(std::vector<Joinable*> joinables, Body&& body,
          const JoinOptions& options = {}) {
  Join join(std::move(joinables), options);
  std::forward<Body>(body)();
  join.finish();
}

}  // namespace lockstep

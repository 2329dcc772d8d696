#pragma once

#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

// Training with uneven inputs: ranks that have no more data shadow the
// communication of those that have. After torch.distributed.algorithms.Join
// (PyTorch documentation, "Generic Join Context Manager").
namespace lockstep {

struct JoinOptions {
  // False: nothing is shadowed and nothing costs, for inputs that are known to
  // be even.
  bool enable{true};
  // Instead of shadowing, std::runtime_error on every rank as soon as one has
  // no more inputs: at the begin of an iteration, or behind the body of the
  // rank that ran out, which the message names.
  bool throw_on_early_termination{false};
  // Of gradients: by the group's size, or by the number of ranks that still
  // have inputs.
  bool divide_by_initial_world_size{true};
};

// Who took part in an iteration. The same on all ranks.
struct JoinRound {
  std::vector<int> active{};  // ranks of the group, ascending
  bool trains{false};         // whether it is with grad
  bool synchronizes{false};   // whether gradients are averaged
};

class Join;

// What communicates once an iteration and can shadow that.
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;
  virtual ~Joinable() = default;

  virtual const ProcessGroupPtr& join_process_group() const = 0;
  // What the active ranks communicate in one iteration, on a rank that has
  // joined.
  virtual void shadow(const JoinRound& round, const JoinOptions& options) = 0;
  // When all have joined; `last_joiner`: the rank of the group that trained
  // longest (of several the highest).
  virtual void after_join(int last_joiner) = 0;

 protected:
  // While a join runs in which this stands; else null.
  Join* current_join() const { return join_; }

 private:
  friend class Join;
  Join* join_ = nullptr;
};

// One join. join() below is how it is used.
class Join {
 public:
  // Throws std::invalid_argument if there are none, or of several groups.
  Join(std::vector<Joinable*> joinables, const JoinOptions& options);
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  ~Join();

  // Collective: what a joinable calls first in each iteration. Of several the
  // first one's call counts; for the others returns what that found.
  // Throws std::logic_error if that has not communicated yet.
  const JoinRound& begin_iteration(const Joinable& joinable, bool synchronizes,
                                   bool trains = true);
  const JoinOptions& options() const { return options_; }
  size_t joinables() const { return joinables_.size(); }

  // Shadows until all ranks came here. Collective.
  void finish();

 private:
  // `mine`: 0 joined, 1 active, 2 and with grad, 3 and averages gradients.
  JoinRound exchange(int mine);

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  ProcessGroupPtr group_;
  JoinRound round_{};
};

// Runs `body`, the training loop of this rank, in which the ranks may do
// different numbers of iterations; returns when all have ended theirs, with
// the parameters and buffers of the rank that trained longest on all of them.
//
// A rank without inputs does not step, so there the state (moments, step
// counts) of an optimizer that each rank keeps whole gets old, and replicas
// would drift apart after the join, without an error. Name a JoinedOptimizer
// (joined_optimizer.h) for each that has any: all but SGD without momentum. A
// sharded optimizer is named itself. Schedulers and a GradScaler have state as
// well: step schedulers outside of the body, and see docs/zero.md.
//
// What else the ranks with inputs communicate in an iteration, the others do
// not take part in: a sharded optimizer refuses clipping and unscaling, as they
// are collective.
//
// Each iteration begins with the forward of the first joinable that
// communicates; under the join every forward counts as an iteration. Blocking:
// as the collectives. What `body` throws passes through, and the other ranks
// wait for this one until their deadline.
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

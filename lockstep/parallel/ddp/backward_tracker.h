#pragma once

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::internal {

// Receives what a BackwardTracker reports. Calls come one at a time, under the
// tracker's lock, in the thread in which autograd does the work.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;

  // A backward pass that averages begins. Called before any gradient of the
  // pass, except for a gradient that reaches its parameter without passing
  // through a result of forward. `left_out`: of how many counted forwards
  // before it no backward was made, since the average before: their results are
  // destroyed, or this backward does not go through them.
  virtual void backward_begins(int64_t left_out) = 0;
  // Autograd has added to the .grad of the parameter with this index, in the
  // averaging backward or in one nested in it. May be called several times for
  // a parameter. `added`: what was added, if no hook of the user is still to
  // see it (otherwise undefined); it may share its memory with .grad.
  virtual void gradient_accumulated(size_t parameter,
                                    const at::Tensor& added) = 0;
  // The averaging backward has done all its work.
  virtual void backward_ends() = 0;
  // An exception has ended the averaging backward. Must not throw.
  virtual void backward_given_up() = 0;

  // Like gradient_accumulated(), but in a backward that does not average.
  // `ours`: the backward goes through a forward under no_sync; otherwise it
  // does not go through the wrapper at all.
  virtual void local_gradient(size_t parameter, bool ours) = 0;

  // Called before and after autograd works on graphs of the wrapper's forwards,
  // for backward() and for grad(). graph_left() must not throw.
  virtual void graph_entered() = 0;
  virtual void graph_left() = 0;

  // Another wrapper averages this parameter, too.
  // refuse_sharing() comes first and may refuse by throwing; then
  // parameter_shared() reports it.
  virtual void refuse_sharing() const = 0;
  virtual void parameter_shared(size_t parameter) = 0;

  // An exception has destroyed the results of a synchronising forward before
  // any backward averaged, so this rank will not contribute to an iteration.
  // `left_out`: as in backward_begins().
  virtual void forward_lost(int64_t left_out) noexcept = 0;
};

// Tells which of the backward passes that reach a wrapper's parameters are the
// wrapper's own, and when such a pass ends.
//
// A backward pass is the wrapper's own if its graph has a node that one of the
// wrapper's forwards made. A node knows the thread that made it and has a
// sequence number that counts up in that thread. So the tracker remembers a
// forward as a range of these numbers, and whether the forward synchronises.
// (The cast of a leaf that Autocast keeps for all forwards under one guard does
// not count, whichever of them has made it.) Derivatives of a forward
// (create_graph) are remembered as another range. Any other pass that reaches a
// parameter, such as a backward of the plain module, is not the wrapper's, with
// one exception: if grad() has taken gradients of the parameters from a forward
// that synchronises, and has used up its graph (no retain_graph), the next pass
// averages: first-order meta-learning, where the query's graph begins at
// parameters minus these gradients.
//
// The tensors that a forward returns announce their backward: the node that
// made each of them has a hook, which autograd calls before it does any work on
// that forward's graph. The hook puts the end mark on the graph task in which
// it is called. This is the outermost task, although parameters may get their
// gradients only in nested ones (re-entrant checkpointing). If a gradient comes
// before any announcement, as from a loss that the module kept in a member, the
// tracker searches the nodes of the graph.
//
//   idle --- announced, or gradient of a graph of ours ---> averaging
//   averaging --- the graph task ends ---> idle   (backward_ends)
//   averaging --- an exception destroys the graph task ---> idle
//                                                 (backward_given_up)
//
// While averaging, every gradient counts for the pass that averages, because
// any other pass that runs at this time is nested in it. A forward of the
// wrapper is refused (std::logic_error). A gradient is also refused if it comes
// in a pass that is nested in one of the wrapper's nodes without an
// announcement (std::runtime_error at the end of that pass): the tracker could
// not know when the outer pass ends.
//
// A wrapper has several trackers if requires_grad changes. Two of them that
// have a parameter in common cannot average at the same time, since each would
// bring its .grad into a bucket of its own: the pass that makes the second one
// average throws std::logic_error.
//
// If an exception ends a synchronising forward, or destroys its results before
// any backward has averaged, this rank has lost an iteration (forward_lost()).
// The exception then came from forward, from the loss, or from the part of
// backward that runs before the wrapper's graph.
//
// Threads: one thread at a time calls forward; backward may run in any thread.
class BackwardTracker : public std::enable_shared_from_this<BackwardTracker> {
 public:
  // `listener` must live until detach() is called. `owner`: lives as long as
  // the wrapper; two trackers of one wrapper do not count as sharing their
  // parameters. If the tracker ends before the wrapper does, a backward() that
  // it would have announced throws std::logic_error.
  static std::shared_ptr<BackwardTracker> make(
      BackwardListener& listener, const std::vector<at::Tensor>& parameters,
      std::weak_ptr<const void> owner);
  ~BackwardTracker();

  // Ends all calls to the listener.
  void detach();

  // Puts hooks on the parameters' gradient accumulators, unless they have them
  // already. LibTorch creates a new accumulator when a parameter's dtype or
  // device changes; graphs that hold the old one keep its hook. Calls
  // refuse_sharing() and parameter_shared() of both trackers for each parameter
  // that another tracker watches, too.
  void watch();

  // Called before a forward. Throws std::logic_error if an averaging backward
  // is running; waits up to a second for one that an exception has just ended.
  void require_idle();
  // Called around a forward in grad mode, in its thread. `synchronizes`:
  // whether backward passes through it average. result() is called for each
  // tensor that forward returns, before end_forward(). `counts`: whether it can
  // be one of BackwardListener's `left_out`, if it synchronises. `threw`: an
  // exception ends the forward.
  void begin_forward(bool synchronizes, bool counts);
  void result(const at::Tensor& tensor);
  // Returns whether a result is a watched parameter itself, or leads to one by
  // a graph that is older than the forward, so that the graph has no node of
  // this forward.
  bool has_older_graph(const at::Tensor& tensor) const;
  void end_forward(bool threw);
  // Tells that this rank takes part in an average without a backward. Returns
  // BackwardListener's `left_out`.
  int64_t shadow_averaging();

  // During an averaging backward, returns for each parameter whether the
  // current graph leads to it.
  std::vector<bool> reachable() const;
  bool is_averaging() const { return averaging_ != kNoTask; }

  // Guards what the listener shares with backward's threads. Recursive, because
  // code that runs in backward may call the tracker again.
  std::recursive_mutex& mutex() const { return mutex_; }

 private:
  // LibTorch's own handle; its type differs between releases.
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  // LibTorch's number of no graph task.
  static constexpr int kNoTask = -1;
  enum class Kind {
    averages,  // a backward through a forward that synchronises
    local,     // a backward through a forward under no_sync
    observes,  // grad(): accumulates nothing
    foreign,   // a backward through no forward of ours
    failed,    // backward_begins() has thrown
  };
  // A graph task that is running.
  struct Task {
    int id;
    Kind kind;
  };
  struct Range {
    uint64_t end;
    bool synchronizes;
  };
  struct Watched {
    at::Tensor tensor;
    NodePtr accumulator;
    uintptr_t hook = 0;
  };
  class AccumulatedHook;
  class Awaited;
  class ResultHook;
  class EndMark;
  using Position = std::pair<uint64_t, uint64_t>;  // thread, sequence number

  BackwardTracker(BackwardListener& listener, std::weak_ptr<const void> owner)
      : listener_(&listener), owner_(std::move(owner)) {}

  bool has_owner_of(const BackwardTracker& other) const {
    return !owner_.owner_before(other.owner_) &&
           !other.owner_.owner_before(owner_);
  }

  void watch(size_t index);
  void on_accumulated(size_t index, const AccumulatedHook& hook,
                      const at::Tensor& added);
  bool is_last(size_t index, const AccumulatedHook& hook) const;
  void on_result(bool synchronizes);
  void on_result_lost(uint64_t forward) noexcept;
  void on_awaited_end(const Awaited& forward, bool left_out) noexcept;
  int64_t take_left_out();
  void on_task_end(int id);
  void on_task_death(int id) noexcept;

  Task* find_task(int id);
  Task& track_task(Kind kind);
  std::optional<Kind> remove_task(int id);
  void begin_averaging(int id);
  void refuse_second_average() const;
  bool accumulates_here() const;
  bool takes_gradients_here() const;
  static bool is_kept_cast(const torch::autograd::Node& node);
  Kind kind_by_nodes(bool announced) const;
  bool is_older(const torch::autograd::Node& node) const;
  const Range* range_of(const torch::autograd::Node& node) const;
  void remember(Position begin, Range range);

  mutable std::recursive_mutex mutex_;
  BackwardListener* listener_;
  const std::weak_ptr<const void> owner_;
  std::vector<Watched> watched_;  // the parameters

  std::map<Position, Range> ranges_;  // by their start
  // Their keys, the oldest first.
  std::deque<Position> remembered_;
  // For each thread: the end of the forgotten ranges.
  std::map<uint64_t, uint64_t> forgotten_;
  // The forward that is running.
  std::optional<Position> forward_;
  bool synchronizes_ = false;
  std::shared_ptr<Awaited> awaited_;
  uint64_t forwards_ = 0;  // how many have synchronised
  // How many of these came before the last averaging backward or the last lost
  // result.
  uint64_t averaged_ = 0;
  // Whether grad() has used up the graph of one of the others.
  bool spent_ = false;
  // The counted forwards since the last averaging pass has ended, in whatever
  // way, that wait for a backward; and how many cannot have one.
  std::vector<const Awaited*> waiting_;
  int64_t left_out_ = 0;
  // The start of the nodes that a task makes with create_graph.
  struct Derivatives {
    int task;
    Position begin;
    bool synchronizes;
  };
  std::vector<Derivatives> derivatives_;

  std::vector<Task> tasks_;
  int entered_ = 0;  // how many of tasks_ are not foreign
  // The task that averages. Other trackers of the wrapper read it without the
  // lock.
  std::atomic<int> averaging_{kNoTask};
};

}  // namespace lockstep::internal

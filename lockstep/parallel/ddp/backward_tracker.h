#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep {

// What a BackwardTracker reports. Calls come one at a time, under the tracker's
// lock, in the thread in which autograd does the work.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;

  // A backward pass that averages begins. Called before any gradient of the
  // pass, except one that reaches its parameter without passing a result of
  // forward.
  virtual void backward_begins() = 0;
  // Autograd has added to the .grad of the parameter with this index, in the
  // averaging backward or in one nested in it. It may come several times.
  virtual void gradient_accumulated(size_t parameter) = 0;
  // The averaging backward has done all its work.
  virtual void backward_ends() = 0;
  // The averaging backward was ended by an exception. Must not throw.
  virtual void backward_given_up() = 0;

  // The same as gradient_accumulated(), from a backward that does not average.
  // `ours`: through a forward under no_sync; otherwise not through the wrapper
  // at all.
  virtual void local_gradient(size_t parameter, bool ours) = 0;

  // Before and after autograd works on graphs of the wrapper's forwards, for
  // backward() and for grad(). graph_left() must not throw.
  virtual void graph_entered() = 0;
  virtual void graph_left() = 0;

  // Another wrapper averages this parameter (or one of watch_also()), too:
  // first asks, which may be refused by throwing, then tells.
  virtual void refuse_sharing(size_t parameter) const = 0;
  virtual void parameter_shared(size_t parameter) = 0;

  // An exception has taken the results of a synchronising forward along before
  // any backward averaged: this rank's part of an iteration does not come.
  virtual void forward_lost() noexcept = 0;
};

// Tells which of the backward passes that reach the parameters of a wrapper are
// the wrapper's own, and when such a pass ends.
//
// A backward pass is the wrapper's if its graph has a node that one of the
// wrapper's forwards made. A node has the thread that made it and a sequence
// number that counts up in that thread, so a forward is remembered as a range
// of these numbers, with whether it synchronises. Derivatives of a forward
// (create_graph) are remembered as another range. Everything else that reaches
// a parameter, as a backward of the plain module, is not the wrapper's.
//
// The tensors that a forward returns announce their backward: a hook on the
// node that made each is called before autograd does any work of that forward.
// It puts the end mark on the graph task that it is called in, which is the
// outermost one, though parameters may get their gradients in nested ones only
// (re-entrant checkpointing). Where a gradient comes first, as from a loss that
// the module kept in a member, the nodes of the graph are searched.
//
//   idle --- announced, or gradient of a graph of ours ---> averaging
//   averaging --- the graph task ends ---> idle   (backward_ends)
//   averaging --- an exception destroys the graph task ---> idle
//                                                 (backward_given_up)
//
// While averaging, every gradient counts for the pass that averages, as any
// other pass that runs then is nested in it; a forward of the wrapper is
// refused (std::logic_error). A gradient that comes in a pass that is nested in
// a node of ours, but not announced, is refused, too (std::runtime_error at the
// end of that pass): when the outer pass ends could not be known.
//
// Where an exception ends a synchronising forward, or destroys its results
// before any backward has averaged, this rank has lost an iteration
// (forward_lost()): forward, the loss, or the part of backward before the
// wrapper's has thrown.
//
// Threads: one thread at a time calls forward; backward may run in any thread.
class BackwardTracker : public std::enable_shared_from_this<BackwardTracker> {
 public:
  // `listener` must outlive the call to detach(). `owner`: the wrapper; two
  // trackers of one wrapper do not share parameters with each other.
  static std::shared_ptr<BackwardTracker> make(
      BackwardListener& listener, const std::vector<at::Tensor>& parameters,
      const void* owner);
  ~BackwardTracker();

  // Calls back no more.
  void detach();

  // Puts hooks on the parameters' gradient accumulators, unless they are there.
  // LibTorch creates a new accumulator when a parameter's dtype or device
  // changes; graphs that hold the one before keep its hook.
  // Calls refuse_sharing() and parameter_shared() of both trackers for each
  // parameter that another one watches, too.
  void watch();
  // Also calls `accumulated` when the gradient of `tensor` is there, in an
  // averaging backward, as the listener is called.
  void watch_also(const at::Tensor& tensor, std::function<void()> accumulated);

  // Before a forward. Throws std::logic_error if an averaging backward is under
  // way; waits up to a second for one that an exception has ended just now.
  void require_idle();
  // Around a forward in grad mode, in its thread. `synchronizes`: whether
  // backward passes through it average. result(): for each tensor that it
  // returns, before end_forward(). `threw`: an exception ends the forward.
  void begin_forward(bool synchronizes);
  void result(const at::Tensor& tensor);
  // Whether a result leads to a watched parameter by a graph that is older than
  // the forward, or is one itself, so that no node of forward is in it.
  bool has_older_graph(const at::Tensor& tensor) const;
  void end_forward(bool threw);

  // In an averaging backward: by parameter, whether the graph that is worked on
  // leads to it.
  std::vector<bool> reachable() const;
  bool is_averaging() const;

  // Guards what the listener shares with backward's threads. Recursive: what is
  // called in backward may ask in turn.
  std::recursive_mutex& mutex() const { return mutex_; }

 private:
  // LibTorch's own handle: its type differs between releases.
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  enum class Kind {
    averages,  // a backward through a forward that synchronises
    local,     // through one under no_sync
    observes,  // grad(): accumulates nothing
    foreign,   // a backward through none
    failed,    // backward_begins() has thrown
  };
  // A graph task that is under way.
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
    std::function<void()> also = {};  // instead of the listener
  };
  class AccumulatedHook;
  class ResultHook;
  class EndMark;
  using Position = std::pair<uint64_t, uint64_t>;  // thread, sequence number

  BackwardTracker(BackwardListener& listener, const void* owner)
      : listener_(&listener), owner_(owner) {}

  void watch(size_t index);
  void on_accumulated(size_t index);
  void on_result(bool synchronizes);
  void on_result_lost(uint64_t forward) noexcept;
  void on_task_end(int id);
  void on_task_death(int id) noexcept;

  Task* find_task(int id);
  Task& track_task(Kind kind);
  std::optional<Kind> remove_task(int id);
  void begin_averaging(int id);
  bool accumulates_here() const;
  Kind kind_by_nodes() const;
  bool is_older(const torch::autograd::Node& node) const;
  const Range* range_of(const torch::autograd::Node& node) const;
  void remember(Position begin, Range range);

  mutable std::recursive_mutex mutex_;
  BackwardListener* listener_;
  const void* const owner_;
  std::vector<Watched> watched_;  // the parameters, then watch_also()
  size_t parameters_ = 0;

  std::map<Position, Range> ranges_;        // by where they begin
  std::deque<Position> remembered_;         // the same, the oldest first
  std::map<uint64_t, uint64_t> forgotten_;  // by thread: up to where
  // The forward that is under way.
  std::optional<Position> forward_;
  bool synchronizes_ = false;
  uint64_t forwards_ = 0;  // that synchronised
  uint64_t averaged_ = 0;  // of these, made before an averaging backward
  // Where the nodes begin that a task makes with create_graph.
  struct Derivatives {
    int task;
    Position begin;
    bool synchronizes;
  };
  std::vector<Derivatives> derivatives_;

  std::vector<Task> tasks_;
  int entered_ = 0;  // how many of tasks_ are not foreign
  std::optional<int> averaging_;
};

}  // namespace lockstep

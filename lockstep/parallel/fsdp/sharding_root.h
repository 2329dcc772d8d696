#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/parallel/fsdp/flat_parameters.h"
#include "lockstep/parallel/fsdp/shard_reduction.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"
#include "lockstep/parallel/fsdp/unit_hooks.h"
#include "lockstep/parallel/fsdp/unit_order.h"

namespace lockstep::internal {

// The units of one model, and what happens when. The outermost forward and
// backward are the outermost forward of any of the units, and the backward that
// goes through it.
//
// If the ranks use one copy of the parameters, nobody tells this class when an
// optimizer steps, so the program is divided into phases by barriers:
//
//   quiet --- an outermost forward begins: barrier ---> forward
//   forward --- ends without a graph (no_grad): barrier ---> quiet
//   forward --- ends with a graph ---> expects_backward
//   expects_backward --- autograd comes to a result of a unit ---> backward
//   expects_backward --- an outermost forward begins: barrier ---> forward
//   backward --- the graph task has ended: barrier ---> quiet
//   quiet --- a backward through an older graph ---> backward
//   quiet --- begin_micro_batches(): barrier ---> micro_batches
//   micro_batches --- end_micro_batches(): barrier ---> quiet
//
// All reading of full parameters lies in the other phases, all writing of
// shards must lie in quiet. The barrier that leads into quiet says that every
// rank has ended reading. (The last reduction of a backward would not do: it
// ends when every rank has published its gradients, and after that a rank may
// still use frozen parameters; under no_sync() there is none.) The barrier that
// leads out of it says that every rank has ended writing: an optimizer's step,
// a snapshot that was loaded, a change by hand. Writing in another phase is
// found by the version counters of the shards and throws std::logic_error: when
// the next forward begins in expects_backward, and when backward begins, which
// also finds a step between a forward and its backward. The next forward has
// the new values: every rank has made the same mistake, or one of them waits
// for the others in vain and throws, too.
//
// If parameters are gathered, each gather is such a barrier for its unit. What
// is gathered is freed when a phase leads into quiet, so a later forward never
// computes with old values. The order of the units is learned in each outermost
// forward; in the next one, every unit starts the gather of its successor, and
// in backward that of its predecessor, which run while it computes.
//
// With a number of ranks as reshard_after_forward, a rank keeps a part of a
// unit from the end of its forward to its backward, and again between the
// backwards of several calls in one forward. The parts are freed with what is
// gathered.
//
// Gradients: autograd accumulates in .grad of the compute tensors. When
// backward leaves a unit (the gradients of its inputs are complete), the unit's
// gradients are reduced; those that are left then, when the backward has ended.
// Where backward leaves a unit follows from the graph of the unit's inputs and
// not from which parameters were used, so that it is in the same order on all
// ranks even if their used parameters differ.
//
// A unit that a rank leaves out, or takes in another order than its peers, is
// an error on all ranks: in shared memory the reductions compare the units;
// other ranks compare what they have gathered and reduced (UnitOrder), by one
// small message when a phase leads into quiet, and before gradients come to
// .grad.
//
// A parameter that no rank has used gets no gradient: ranks agree about what
// they used, by that message or in shared memory.
//
// A backward inside of a forward (grad()) only gathers what it needs. A
// backward that makes a graph (create_graph) goes out of a unit through results
// of its own (UnitInputs), by which the next backward knows what it has to
// gather.
//
// Micro-batches of a pipeline: several forwards live before their backwards,
// and a backward may be in two parts, of which the second does not go through
// the results of the units. So nothing there depends on hooks. Every unit is
// gathered once, at the latest in its first forward, and stays; gradients add
// up on each rank; at the end all units are reduced, in one order.
//
// Threads: one at a time.
class ShardingRoot : public std::enable_shared_from_this<ShardingRoot> {
 public:
  ShardingRoot(ProcessGroupPtr group, ProcessGroupPtr replicate_group);
  ShardingRoot(const ShardingRoot&) = delete;
  ShardingRoot& operator=(const ShardingRoot&) = delete;
  ~ShardingRoot();

  const ProcessGroupPtr& group() const { return group_; }
  // Units that contain others come after them.
  void add(const std::shared_ptr<ShardedUnit>& unit) { units_.push_back(unit); }
  std::vector<std::shared_ptr<ShardedUnit>> units() const;
  bool is_last(const ShardedUnit& unit) const {
    return units_.back().lock().get() == &unit;
  }
  // Makes the groups of `ranks` neighbours, unless a root that lives has them,
  // or they are this rank alone or the whole group. Collective.
  void make_neighbours(int ranks);
  // Takes over those that the root of units in these ones has made.
  void take_neighbours(const ShardingRoot& other) {
    neighbours_.insert(other.neighbours_.begin(), other.neighbours_.end());
  }

  // begin_forward() returns a call if grad mode is on. `has_graph`: whether a
  // result requires grad.
  std::shared_ptr<UnitCall> begin_forward(ShardedUnit& unit);
  // Throws std::invalid_argument if full parameters were written in the
  // outermost forward, which ends. `has_graph`: as in end_forward(). If the
  // ranks share memory, backwards of the others that reduce throw, too.
  void check_forward(bool has_graph);
  void end_forward(ShardedUnit& unit, UnitCall* call, bool has_graph);
  void forward_threw(ShardedUnit& unit) noexcept;
  void before_backward(UnitCall& call);
  void after_backward(UnitCall& call);
  // A full parameter has got a gradient. If no backward through a unit takes
  // it, the pass that brought it throws std::logic_error when it ends.
  void gradient_came();

  // Forwards and backwards of any units, in any order and number, lie between
  // begin_micro_batches() and end_micro_batches(), or give_up(). Collective;
  // keep_gradients() is not. Call keep_gradients() after every backward.
  // `reduces`: whether gradients are averaged, unless under no_sync().
  void begin_micro_batches();
  void keep_gradients();
  void end_micro_batches(bool reduces);
  void give_up() noexcept;

  // Whether there are full gradients that no_sync() has kept.
  bool keeps_gradients() const { return keeps_gradients_; }

  void start_unshard(ShardedUnit& unit);
  void wait_unshard(ShardedUnit& unit);
  void reshard(ShardedUnit& unit);

  bool requires_gradient_sync = true;

 private:
  enum class Phase {
    quiet,
    forward,
    expects_backward,
    backward,
    micro_batches
  };

  void begin_reading();
  // `compares`: unless that was done since the last collective of a unit.
  void end_reading(bool compares = true);
  void prepare(const std::vector<std::shared_ptr<ShardedUnit>>& units);
  // Throws c10::DistBackendError on all ranks if they train different
  // parameters. Collective.
  void require_same_trained(
      const std::vector<std::shared_ptr<ShardedUnit>>& units);
  // After reconfigure(): gives up what the ranks had begun, and makes anew what
  // belongs to one generation of the groups. Collective.
  void begin_again();
  void barrier();
  void gather(ShardedUnit& unit);
  void prefetch(ShardedUnit& unit);
  void reduce(ShardedUnit& unit, FlatParameters& flat);
  // Collective. Throws c10::DistBackendError on all ranks if they went through
  // units in different orders. `reduced`: in a backward that reduces.
  void compare_orders(bool reduced);
  // Whether no unit is gathered.
  bool in_common() const;
  size_t number_of(const ShardedUnit& unit) const;
  std::string name_of(size_t number) const;
  void release(ShardedUnit& unit);
  // Does to the full parameters what reshard_after_forward says.
  void reshard_for_backward(ShardedUnit& unit);
  void begin_backward();
  void leave(ShardedUnit& unit);
  void end_backward();
  // Returns which parameter has a gradient that no backward has taken; empty if
  // none. Drops all full gradients then.
  std::string drop_stray();
  // Throws std::logic_error if a shard was written since the last call or the
  // beginning of the forward.
  void require_unwritten(const char* when);
  // Throws std::invalid_argument if a full parameter was written since then.
  void require_full_unwritten();
  // Throws std::logic_error if LibTorch has clipped gradients of shards.
  void require_unclipped(
      const std::vector<std::shared_ptr<ShardedUnit>>& units);
  // Bit by bit for all parameters of all units, whether this rank gave a
  // gradient to a reduction. 63 in each word.
  std::vector<int64_t> used_bits() const;
  // In shared memory: write_used() gives the other ranks used_, and after the
  // next barrier read_used() adds theirs.
  void write_used();
  void read_used();
  int64_t* used_row(int rank) const;
  // Throws std::logic_error if a unit got gradients that came through none of
  // its results.
  void require_entered();
  // FlatParameters::settle_gradients() of all units.
  void settle_gradients();

  std::vector<std::weak_ptr<ShardedUnit>> units_;
  BufferPool pool_;
  const ProcessGroupPtr group_;
  const ProcessGroupPtr replicate_group_;
  std::vector<FlatParameters*> prepared_;  // for these reduction_ was made
  bool found_write_ = false;               // by the last require_unwritten()
  std::unique_ptr<ShardReduction> reduction_;
  std::unique_ptr<SplitBarrier> barrier_;  // null if no rank shares memory
  std::vector<int64_t> used_;  // used_bits(), then those of any rank
  // int64 [2 * ranks, words of used_], which all ranks have in common. Each has
  // two rows, used in turn: it may write before others have read the last one.
  at::Tensor used_board_;
  int used_turn_ = 0;
  // The neighbours with which this rank gathers in backward, by their number.
  std::map<int, ProcessGroupPtr> neighbours_;

  Phase phase_ = Phase::quiet;
  int depth_ = 0;           // of forwards
  bool with_grad_ = false;  // the outermost forward
  int64_t forwards_ = 0;    // outermost ones
  int64_t reductions_ = 0;
  UnitOrder order_in_group_;
  UnitOrder order_in_replicas_;  // of reductions only
  bool accumulates_ = false;  // in backward: into .grad, which grad() does not
  bool syncs_ = true;         // in backward
  bool keeps_gradients_ = false;  // under no_sync()
  int64_t backwards_ = 0;
  bool found_stray_ = false;  // in the pass that runs now

  // The units in the order in which their forwards began, in the last outermost
  // forward and in the running one; and those that have ended in this one. A
  // unit without a graph may be gone before the backward.
  std::vector<ShardedUnit*> order_;
  std::vector<ShardedUnit*> begun_;
  std::vector<std::weak_ptr<ShardedUnit>> ended_;

  // If the training can be healed.
  std::optional<OnReconfigured> on_reconfigured_{};
};

}  // namespace lockstep::internal

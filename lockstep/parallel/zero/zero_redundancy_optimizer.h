#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"
#include "lockstep/parallel/zero/sharding_traits.h"
#include "lockstep/parallel/zero/zero_redundancy_options.h"

namespace lockstep {

// An optimizer whose state is divided over the ranks of a group: each rank
// holds and steps its own part of the parameters. It follows Rajbhandari et
// al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
// (SC 2020), section 5.1 (stage 1), and
// torch.distributed.optim.ZeroRedundancyOptimizer.
//
//   DistributedDataParallel<Net> model(Net());
//   ZeroRedundancyOptimizer<optim::AdamW> optimizer(model, {.lr = 1e-3});
//
// The parameters after each step are, bit for bit, those that `OptimizerClass`
// itself computes from the same gradients.
//
// `OptimizerClass`: any optimizer of lockstep::optim or torch::optim except
// LBFGS, or a type of your own (sharding_traits.h). partition.h says which rank
// steps which elements.
//
// It can be made in two ways:
// - From parameters or groups, as in Python. Every rank must then have whole
//   gradients, from any source; step() gathers the stepped parts.
// - From a DistributedDataParallel, whose gradients then travel only to the
//   rank that steps them: after backward(), .grad is final only in this rank's
//   part and undefined elsewhere. This stays so as long as the wrapper lives.
//   With `shared_parameters` nothing is gathered: the constructor moves the
//   parameters of the groups into memory that all ranks share, and from then on
//   there is only one copy of them, even after the optimizer is gone. step()
//   returns when this rank's part is stepped, and the wrapper's next forward
//   waits for the other ranks. Call synchronize() before parameters are read in
//   another way (evaluation outside the wrapper, state_dict, snapshots).
//   Programs that write parameter values must write them in place, the same
//   values on all ranks, or on one rank between two barriers.
//
// param_groups() hold the user's parameters and options, so learning-rate
// schedulers, zero_grad() and other code that works on an optimizer find what
// they expect. state() is empty; local_optimizer() has this rank's state.
// Clipping and GradScaler use gradient_shards().
//
// Collective, in the same order on all ranks: construction, add_param_group(),
// step(), consolidate_state_dict(). They block within the group's timeout. A
// rank whose parameters have no gradients steps nothing, but still takes part
// in step(). If step() throws on one rank only, the others time out at their
// next collective.
//
// Under join() (join.h, `join({&model.joinable(), &optimizer}, ...)`, in this
// order) a rank without inputs goes on stepping its part, once for each
// iteration of the others that averages gradients. Such a rank would not do to
// its part what the others do to gradients between backward and step. So
// clipping and unscaling throw std::logic_error under a join() that shadows, at
// the first call. Other changes of .grad there (if the optimizer was made from
// parameters) are not noticed, and give wrong results.
//
// A parameter that is not dense in memory is not cut; step() refuses a sparse
// gradient with std::invalid_argument, on every rank that has it. Constructors
// throw std::invalid_argument, on all ranks, if the ranks' groups or their
// learning rates differ (other hyperparameters are not compared), if ranks have
// different parts of a parameter (set_placement()), if a parameter is in two
// groups (twice in one group counts once), if the wrapper does not train a
// parameter or trains one that is in no group, or if an option is not possible
// here; the message gives the reason.
//
// `step_in_backward`: this rank's part of a bucket is stepped in backward as
// soon as it is final, and step() only gathers. For graphs that are used once,
// without clipping, GradScaler or a second backward before step(): each of
// these needs the gradients, or the parameters from before the step.
//
// Use from one thread.
template <class OptimizerClass>
class ZeroRedundancyOptimizer : public internal::ShardedOptimizer {
  static_assert(Shardable<OptimizerClass>,
                "ZeroRedundancyOptimizer takes optimizers that step parts of "
                "the parameters alone; LBFGS does not");

 public:
  using Traits = ShardingTraits<OptimizerClass>;
  using Options = typename Traits::Options;

  explicit ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters,
                                   Options defaults = {},
                                   ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(ParamGroups{torch::optim::OptimizerParamGroup(
                                    std::move(parameters))},
                                std::move(defaults), std::move(options)) {}
  template <class = void>
  explicit ZeroRedundancyOptimizer(  // no such option
      const std::vector<at::Tensor>&, ...) = delete;
  explicit ZeroRedundancyOptimizer(ParamGroups groups, Options defaults = {},
                                   ZeroRedundancyOptions options = {})
      : ShardedOptimizer(maker(std::move(defaults)), Traits::element_wise,
                         std::move(groups), std::move(options), nullptr) {}

  // Makes an optimizer for everything that `model` trains, or for `groups` of
  // these parameters. The groups must have all of them, because no other
  // optimizer gets whole gradients; only parameters with sparse gradients may
  // be left to an optimizer of their own. The wrapper may be destroyed before
  // or after the optimizer.
  template <class Module>
  explicit ZeroRedundancyOptimizer(DistributedDataParallel<Module>& model,
                                   Options defaults = {},
                                   ZeroRedundancyOptions options = {})
      : ShardedOptimizer(maker(std::move(defaults)), Traits::element_wise,
                         std::nullopt, std::move(options),
                         &internal::WrapperAccess::state(model)) {}
  // Groups is deduced, so that `{.lr = 1e-3}` is not taken for a list of
  // groups.
  template <class Module, std::same_as<ParamGroups> Groups>
  ZeroRedundancyOptimizer(DistributedDataParallel<Module>& model, Groups groups,
                          Options defaults = {},
                          ZeroRedundancyOptions options = {})
      : ShardedOptimizer(maker(std::move(defaults)), Traits::element_wise,
                         std::move(groups), std::move(options),
                         &internal::WrapperAccess::state(model)) {}

  // Returns this rank's part: one-dimensional pieces of the parameters, and
  // their state.
  const OptimizerClass& local_optimizer() const {
    return static_cast<const OptimizerClass&>(inner());
  }

  // save_snapshot() and load_snapshot() take this optimizer itself if the path
  // is a folder of snapshots: each rank writes and reads its own part. For a
  // file, or another use, the whole state can be collected:
  //
  // The whole state on one rank, as an OptimizerState. That is Python's
  // state_dict() and does not depend on ranks: the unsharded optimizer, or any
  // number of ranks, can load it.
  //
  //   consolidate_state_dict(to)  collective; collects on the group's rank `to`
  //   state_dict()                on that rank; std::logic_error elsewhere
  //   load_state_dict(state)      on every rank, with equal states; takes this
  //                               rank's part
  //
  // An optimizer that was made from a DistributedDataParallel gives the state
  // the parameters' names, and finds parameters by them, in whatever order they
  // are. One that was made from parameters knows no names and goes by their
  // order, as Python does; by names it loads with the module:
  //
  //   load_state_dict(lockstep::state_dict(*plain(), *net), *net)
  //
  // Only for optimizers whose state lockstep::state_dict() knows
  // (optimizer_state.h); std::invalid_argument otherwise.
  using ShardedOptimizer::consolidate_state_dict;
  using ShardedOptimizer::load_state_dict;
  using ShardedOptimizer::state_dict;

  // Returns an unsharded optimizer over the same parameters and groups, for
  // save_snapshot() and load_snapshot() with a file. It has the state on the
  // rank on which consolidate_state_dict() collected it; elsewhere it has none.
  std::unique_ptr<OptimizerClass> plain() const {
    std::unique_ptr<OptimizerClass> whole(
        static_cast<OptimizerClass*>(make_plain().release()));
    if (has_state_dict()) lockstep::load_state_dict(*whole, state_dict());
    return whole;
  }
  void load_state_dict(const OptimizerClass& whole) { load_plain(whole); }

 private:
  static Make maker(Options defaults) {
    return [defaults = std::move(defaults)](const ParamGroups& groups) {
      return std::make_unique<OptimizerClass>(groups, defaults);
    };
  }
};

// A name that can be understood without knowing ZeRO.
template <class Optimizer>
using DistributedOptimizer = ZeroRedundancyOptimizer<Optimizer>;

}  // namespace lockstep

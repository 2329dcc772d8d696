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

namespace lockstep {

// An optimizer whose state is divided over the ranks of a group: each holds and
// steps its own part of the parameters. After Rajbhandari et al., "ZeRO: Memory
// Optimizations Toward Training Trillion Parameter Models" (SC 2020), section
// 5.1 (stage 1), and torch.distributed.optim.ZeroRedundancyOptimizer.
//
//   DistributedDataParallel<Net> model(Net());
//   ZeroRedundancyOptimizer<optim::AdamW> optimizer(model, {.lr = 1e-3});
//
// The parameters it leads to are, bit for bit, those that `OptimizerClass`
// itself leads to from the same gradients.
//
// `OptimizerClass`: any of lockstep::optim or torch::optim but LBFGS, or a type
// of one's own (sharding_traits.h). Which rank steps what: partition.h.
//
// Two forms:
// - From parameters or groups, as in Python. The gradients are whole on every
//   rank, from wherever; step() gathers the stepped parts.
// - From a DistributedDataParallel, whose gradients then travel only to the
//   rank that steps them: behind backward(), .grad is final only in this rank's
//   part and undefined elsewhere. It stays so as long as the wrapper lives.
//   With `shared_parameters`, nothing is gathered: the constructor moves the
//   trained parameters into memory common to all ranks, which share one copy
//   from then on, even when the optimizer is gone. step() returns when this
//   rank's part is stepped, and the wrapper's next forward waits for the
//   others; call synchronize() before parameters are read otherwise (evaluation
//   outside the wrapper, state_dict, snapshots). Values are written in place,
//   the same on all ranks or by one of them between two barriers.
//
// param_groups() hold the user's parameters and options: learning-rate
// schedulers, zero_grad() and whoever else works on an optimizer find what they
// expect. state() is empty; local_optimizer() has this rank's. Clipping and
// GradScaler go by gradient_shards().
//
// Collective, in the same order on all ranks: construction, add_param_group(),
// step(), consolidate_state_dict(). They block within the group's timeout.
// step() of a rank whose parameters have no gradients steps nothing and still
// takes part. If step() throws for a reason of one rank, the others time out at
// their next collective. Under join() (join.h, `join({&model.joinable(),
// &optimizer}, ...)`, in this order) a rank without inputs goes on stepping its
// part, one step for each iteration of the others that averages gradients. So
// what the others do to gradients between backward and step, such a rank would
// not do to its part: clipping and unscaling throw std::logic_error under a
// join() that shadows, at the first call. Changing .grad there otherwise (in
// the form from parameters) is not noticed, and wrong.
//
// Parameters are dense or whole; a sparse gradient is refused by step() with
// std::invalid_argument. Constructors throw std::invalid_argument, on all
// ranks, if the ranks' groups differ, a parameter stands in two groups (twice
// in one it counts once), one is not trained by the wrapper, or an option is
// impossible here, saying why.
//
// `step_in_backward`: this rank's part of a bucket is stepped in backward as
// soon as it is final, and step() only gathers. For graphs that are used once,
// without clipping, GradScaler or a second backward before step(): each of
// them needs the gradients, or the parameters as they were.
//
// Use from one thread.
template <class OptimizerClass>
class ZeroRedundancyOptimizer : public detail::ShardedOptimizer {
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
  explicit ZeroRedundancyOptimizer(ParamGroups groups, Options defaults = {},
                                   ZeroRedundancyOptions options = {})
      : ShardedOptimizer(maker(std::move(defaults)), Traits::element_wise,
                         std::move(groups), std::move(options), nullptr) {}

  // Of all that `model` trains, or of `groups` of these. The wrapper may be
  // destroyed before the optimizer or after it.
  template <class Module>
  explicit ZeroRedundancyOptimizer(DistributedDataParallel<Module>& model,
                                   Options defaults = {},
                                   ZeroRedundancyOptions options = {})
      : ShardedOptimizer(maker(std::move(defaults)), Traits::element_wise,
                         std::nullopt, std::move(options), &model.state()) {}
  // Deduced, so that `{.lr = 1e-3}` is no list of groups.
  template <class Module, std::same_as<ParamGroups> Groups>
  ZeroRedundancyOptimizer(DistributedDataParallel<Module>& model, Groups groups,
                          Options defaults = {},
                          ZeroRedundancyOptions options = {})
      : ShardedOptimizer(maker(std::move(defaults)), Traits::element_wise,
                         std::move(groups), std::move(options),
                         &model.state()) {}

  // This rank's part: one-dimensional pieces of the parameters, and their
  // state.
  const OptimizerClass& local_optimizer() const {
    return static_cast<const OptimizerClass&>(inner());
  }

  // The whole state on one rank, in the form of OptimizerState, which is
  // Python's state_dict() and knows nothing of ranks: it is loaded by the
  // optimizer alone, or by any number of ranks.
  //
  //   consolidate_state_dict(to)  collective; collects on the group's rank `to`
  //   state_dict()                there; std::logic_error elsewhere
  //   load_state_dict(state)      on every rank, of equal states; takes this
  //                               rank's part
  //
  // For kinds that restore_optimizer() knows; std::invalid_argument otherwise.
  using ShardedOptimizer::consolidate_state_dict;
  using ShardedOptimizer::load_state_dict;
  using ShardedOptimizer::state_dict;

  // The optimizer itself over the same parameters and groups, with the state on
  // the rank where consolidate_state_dict() collected it, else without: what
  // save_snapshot() and load_snapshot() take.
  std::unique_ptr<OptimizerClass> plain() const {
    std::unique_ptr<OptimizerClass> whole(
        static_cast<OptimizerClass*>(make_plain().release()));
    if (has_state_dict()) restore_optimizer(*whole, state_dict());
    return whole;
  }
  void load_state_dict(const OptimizerClass& whole) {
    ShardedOptimizer::load_state_dict(capture_optimizer(whole));
  }

 private:
  static Make maker(Options defaults) {
    return [defaults = std::move(defaults)](const ParamGroups& groups) {
      return std::make_unique<OptimizerClass>(groups, defaults);
    };
  }
};

// The name that says what it is, for who comes without ZeRO in mind.
template <class Optimizer>
using DistributedOptimizer = ZeroRedundancyOptimizer<Optimizer>;

}  // namespace lockstep

#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/parallel/fsdp/fully_shard_options.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"
#include "lockstep/parallel/module/wrapped_module.h"

namespace lockstep {

// Sharded data parallel (ZeRO-2 and ZeRO-3) of one module on every rank: each
// rank keeps a part of the parameters, of their gradients and of the state of
// the optimizer. It follows torch.distributed.fsdp.fully_shard (PyTorch
// documentation, "FSDP2") and Rajbhandari et al., "ZeRO: Memory Optimizations
// Toward Training Trillion Parameter Models" (SC 2020).
//
// A FullyShard is one *unit*: parameters that are gathered, used and freed
// together. Units nest. Usually each block of a model is one, and the model is
// another, for the parameters that are left:
//
//   struct NetImpl : torch::nn::Module {
//     NetImpl() {
//       for (int i = 0; i < 12; ++i) {
//         blocks.emplace_back([] { return Block(512); });
//         register_module("block" + std::to_string(i), blocks[i].ptr());
//       }
//     }
//     at::Tensor forward(at::Tensor x) {
//       for (auto& block : blocks) x = block(x);
//       return x;
//     }
//     std::vector<FullyShard<Block>> blocks;
//   };
//   FullyShard<Net> model([] { return Net(); });
//   torch::optim::AdamW optimizer(model->parameters());
//
// A unit is a handle, like a module holder: copies are the same unit. It has
// the members of a module (wrapped_module.h), so block->forward(x) is the same
// as block(x). A call of its module, block.module()->forward(x), does not
// gather; a backward through it throws std::logic_error if it brings gradients
// that no unit takes. The module that is registered is the unit's own, so that
// names of parameters are those of the model without units. A group of one rank
// is allowed: the same program then runs without sharding.
//
// The registered parameters are *shards* from then on: parameters() gives
// tensors with this rank's elements, which may be none. A shard has as many
// dimensions as its parameter, so that dim() may tell weights from biases:
// [rows, ...] if its elements are whole rows, otherwise [1, ..., 1, n]. The
// members of the module, such as `weight`, are the full parameters. They may be
// used in forward, and between unshard() and reshard(); at another time they
// have no data (c10::Error), or may change any moment (if ranks share
// memory). Make the optimizer, and load snapshots, after the last unit is
// constructed, and move modules (to()) before. Parameters must not be in a
// ParameterList or ParameterDict. A layer that is added, replaced or removed
// after the last unit is constructed is refused by the next forward with grad
// (std::invalid_argument): a new one would be neither divided nor averaged.
//
// The constructor takes a holder or a std::shared_ptr of the module, or a
// function that returns one. The full parameters that the module was
// constructed with are freed, so the peak while blocks are constructed one
// after another is all shards and one block. Every rank gets the values of rank
// 0 (FullyShardOptions::init_sync).
//
// An optimizer sees this rank's elements only, so it must step each element by
// itself, as SGD and AdamW do. Steps that need sums over all elements, as
// torch::optim::LBFGS or norms of layers, would be wrong in silence.
//
// When backward() returns, the .grad of the shards are averaged over the ranks
// (and over replicate_group). A parameter that this rank did not use counts as
// a gradient of zeros; one that no rank used has no gradient. Hooks of shards
// are called with this rank's part of the average (register_hook()), and when
// every rank has ended backward (post-accumulate hooks). Frozen parameters
// (requires_grad false, which may change between iterations, on all ranks
// alike) cost no communication of gradients. A parameter that is registered
// twice in a unit is one; a parameter in two units is refused. The .grad of
// shards have no graph (create_graph); gradients must be dense. A backward must
// come to a unit through what its forward returned.
//
// Collective: the constructor, every outermost forward (with or without grad),
// every backward through it, unshard() and reshard(). All ranks go through the
// same units in the same order; otherwise all ranks throw
// c10::DistBackendError before .grad of shards changes. Shards may be written
// (by a step, a load, by hand) after backward, and after a forward without
// grad. If they are written between a forward and its backward, the next
// forward or backward throws std::logic_error, provided that version counters
// see the write: writes through data(), as those of torch::optim::SGD, are not
// seen (sharding_root.h has the phases). A forward whose graph is dropped
// counts as one that expects a backward: use torch::NoGradGuard to evaluate.
//
// Forward may write its input tensors in place, unless they are leaves that
// require grad, and put tensors into arguments that it takes by reference;
// these are results, too. The tensors of results must be found
// (forward_result.h). Results must not be parameters or views of them, and
// forward must not write parameters (std::invalid_argument).
//
// Errors: std::invalid_argument for mistakes, on all ranks if they differ;
// c10::DistBackendError if something failed between the ranks. If an exception
// ends a backward, the iteration is given up: gradients that were not in .grad
// of shards yet are lost, and the next forward starts again, provided that
// every rank has given up. If the ranks share one copy of the parameters, peers
// that wait for gradients of this rank throw at once. Elsewhere peers may wait
// for the group's timeout, and a rank that has given up alone may have made
// other gathers than they, so that the group is of no use.
//
// Use from one thread.
template <typename Module>
class FullyShard : public WrappedModule<FullyShard<Module>, Module> {
 public:
  using WrappedModule<FullyShard, Module>::module;

  explicit FullyShard(const ModuleHandle<Module>& given,
                      const FullyShardOptions& options = {})
      : WrappedModule<FullyShard, Module>(given),
        unit_(internal::ShardedUnit::make(*module(), options)) {}
  template <class = void>
  explicit FullyShard(  // no such option
      const ModuleHandle<Module>&, ...) = delete;
  // `make()` returns the module.
  template <typename Make>
    requires(!std::convertible_to<const Make&, ModuleHandle<Module>>) &&
            std::convertible_to<std::invoke_result_t<const Make&>,
                                ModuleHandle<Module>>
  explicit FullyShard(const Make& make, const FullyShardOptions& options = {})
      : FullyShard(ModuleHandle<Module>(make()), options) {}

  // The same as module(), for register_module() of the module that contains
  // this one.
  const auto& ptr() const { return module(); }
  // Not possible: call to() of the module before you shard it.
  template <typename... Args>
  void to(Args&&...) = delete;  // call to() of the module before you shard it

  // While the result lives, backward passes leave the full gradients on this
  // rank, which takes their memory; the next backward after it averages the
  // sum.
  NoSync no_sync() {
    const bool before = unit_->set_requires_gradient_sync(false);
    return NoSync(
        [unit = unit_, before] { unit->set_requires_gradient_sync(before); });
  }
  // Zeroes, or drops, the gradients of the shards and what no_sync() has kept
  // in this unit and those in it. An optimizer's zero_grad() sees shards only.
  void zero_grad(bool set_to_none = true) {
    WrappedModule<FullyShard, Module>::zero_grad(set_to_none);
    unit_->zero_kept_gradients(set_to_none);
  }
  // Does the same until it is called again. For all units of the model; what
  // counts is the value when a backward begins.
  void set_requires_gradient_sync(bool requires_gradient_sync) {
    unit_->set_requires_gradient_sync(requires_gradient_sync);
  }

  // Waits for a gather that unshard() has started.
  class UnshardHandle {
   public:
    void wait() {
      if (unit_) unit_->wait_unshard();
      unit_ = nullptr;
    }

   private:
    friend FullyShard;
    explicit UnshardHandle(std::shared_ptr<internal::ShardedUnit> unit)
        : unit_(std::move(unit)) {}

    std::shared_ptr<internal::ShardedUnit> unit_;
  };
  // Gathers the full parameters of this unit (not of units in it), for the next
  // forward, or for use without one until reshard(). With `async_op` returns
  // before they have been gathered; a forward waits by itself. Collective.
  UnshardHandle unshard(bool async_op = false) {
    unit_->start_unshard();
    UnshardHandle handle(unit_);
    if (!async_op) handle.wait();
    return handle;
  }
  // Frees them. Collective.
  void reshard() { unit_->reshard(); }

  // FullyShardOptions::reshard_after_forward, of this unit and, if `recurse`,
  // of the units in it. The same on all ranks, between two iterations; in a job
  // that heals before HealedTraining is made, since a process that takes a
  // place does not learn of later calls.
  void set_reshard_after_forward(ReshardAfterForward reshard_after_forward,
                                 bool recurse = true) {
    unit_->set_reshard_after_forward(reshard_after_forward, recurse);
  }

  const FullyShardOptions& options() const { return unit_->options(); }

 private:
  friend struct internal::WrapperAccess;

  template <typename Forward, typename... Args>
  decltype(auto) run(const Forward& forward, Args&&... args) {
    return internal::run_unit(unit_, *module(), forward,
                              std::forward<Args>(args)...);
  }

  std::shared_ptr<internal::ShardedUnit> unit_;
};

template <typename Module>
FullyShard(Module, ...) -> FullyShard<Module>;

}  // namespace lockstep

#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/ddp_options.h"
#include "lockstep/parallel/ddp/ddp_state.h"
#include "lockstep/parallel/ddp/logging_data.h"
#include "lockstep/parallel/join/join.h"

namespace lockstep {
namespace detail {

// What the constructor of DistributedDataParallel<Module> takes, and the shared
// pointer in it.
template <typename Module>
struct ModulePointer {  // a holder, as TORCH_MODULE makes it
  using Given = Module;
  static auto get(const Given& module) { return module.ptr(); }
};
template <typename Impl>
struct ModulePointer<std::shared_ptr<Impl>> {
  using Given = std::shared_ptr<Impl>;
  static auto get(const Given& module) { return module; }
};
template <std::derived_from<torch::nn::Module> Impl>
struct ModulePointer<Impl> : ModulePointer<std::shared_ptr<Impl>> {};

}  // namespace detail

// Data-parallel training of one module on every rank: its gradients are
// averaged over the ranks when backward() returns. After
// torch.nn.parallel.DistributedDataParallel (PyTorch documentation).
//
// `Module` is a module holder, a Sequential, a class that derives from
// torch::nn::Module, or a std::shared_ptr of one; a module that is not in a
// holder is given as a std::shared_ptr. The module is shared, not copied:
// parameter names are its own, without a "module." prefix, and optimizers take
// `model->parameters()`. Its forward may take anything, and return what
// ForwardResult knows (forward_result.h).
//
// A backward pass averages if it goes through a forward of this wrapper in grad
// mode and outside no_sync(). Others, as of the plain module, do not, and
// grad() never does (backward_tracker.h).
//
// The constructor is collective, as is every forward of a module with buffers
// (and the second one of any). Each rank must call forward and backward as
// often as the others (or join()). Blocking: backward() returns when every
// gradient is final, or throws: c10::DistBackendError of what failed between
// the ranks, or std::runtime_error that names this rank and the parameters
// that got no gradient. No thread is started.
//
// The constructor throws std::invalid_argument, on every rank, if the ranks'
// models differ, naming rank and parameter.
//
// Gradients of Embedding and EmbeddingBag with sparse(true) stay sparse. A
// parameter that is used twice, or registered twice, counts once. One that the
// module registers after the wrapper's constructor is not averaged. Parameters
// whose requires_grad changes after the constructor, on every rank alike, are
// taken in or left out from the next forward on. One that several wrappers
// train is averaged by each of them (distributed-data-parallel.md says what is
// not possible then: std::invalid_argument). Higher-order gradients
// (create_graph) are not reduced.
//
// If an exception ends a backward, or destroys the results of a forward before
// it, the iteration is given up: gradients that lay in buckets are undefined,
// and the next forward begins anew if every rank has given up. In shared memory
// peers that wait for this rank throw at once; elsewhere they get NaN.
//
// Ranks may run Python's DistributedDataParallel over the same model, in a
// group as init_process_group() describes, if their options are the same, no
// gradient is sparse and nothing of Lockstep's own is asked for (join, shards,
// checks).
//
// Use from one thread. Must outlive the backward passes of its forwards.
template <typename Module>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(
      const typename detail::ModulePointer<Module>::Given& module,
      const DistributedDataParallelOptions& options = {})
      : module_(detail::ModulePointer<Module>::get(module)),
        state_(std::make_unique<detail::DdpState>(*module_, options)) {}

  // Takes and returns what the module's forward does.
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    const auto call = [&]() -> decltype(auto) {
      // A module whose forward takes Tensor& sees its argument as it is.
      if constexpr (requires {
                      module_->forward(
                          state_->cast(std::forward<Args>(args))...);
                    }) {
        return module_->forward(state_->cast(std::forward<Args>(args))...);
      } else {
        return module_->forward(std::forward<Args>(args)...);
      }
    };
    using Result = decltype(call());
    detail::DdpState::ForwardPass pass(*state_);
    if constexpr (std::is_void_v<Result>) {
      call();
    } else {
      Result result = call();
      if constexpr (std::is_reference_v<Result>) {
        pass.returns(std::as_const(result));
      } else {
        pass.returns(result);
      }
      return static_cast<Result>(std::forward<Result>(result));
    }
  }
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The wrapped module.
  auto* operator->() const { return module_.get(); }
  const auto& module() const { return module_; }

  // While it lives, backward passes of forwards made under it accumulate
  // gradients on this rank only; the next one outside averages the sum.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(detail::DdpState& state)
        : state_(state),
          before_(std::exchange(state.require_backward_grad_sync, false)) {}
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;
    ~NoSync() { state_.require_backward_grad_sync = before_; }

   private:
    detail::DdpState& state_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(*state_); }

  // Runs `body`, a training loop, in which this rank may do another number of
  // forward and backward passes than the others (join/join.h). With optimizers
  // that communicate: lockstep::join({&ddp.joinable(), &optimizer}, body).
  template <typename Body>
  void join(Body&& body, const JoinOptions& options = {}) {
    lockstep::join({&joinable()}, std::forward<Body>(body), options);
  }
  Joinable& joinable() { return *state_; }

  // `hook` reduces the buckets, instead of the averaging all-reduce; sparse
  // gradients are averaged as before. Once, before the first backward, on every
  // rank alike. Throws std::logic_error otherwise.
  void register_comm_hook(CommHook hook) {
    state_->register_comm_hook(std::move(hook));
  }

  // Each parameter gets an optimizer of its own, made by `make` for that one,
  // which steps in backward as soon as the gradient is averaged; the gradient
  // is gone then. Gradients can be neither clipped nor unscaled nor accumulated
  // over several backward passes outside no_sync(). Before the first backward.
  void apply_optimizer_in_backward(detail::DdpState::MakeOptimizer make) {
    state_->apply_optimizer_in_backward(std::move(make));
  }

  // Of this rank; times are of the last sampled iteration. Does not
  // communicate.
  DDPLoggingData get_ddp_logging_data() const { return state_->logging_data(); }
  // Times are taken of the first 10 iterations, then of one in `rate` (100).
  void set_ddp_runtime_logging_sample_rate(int64_t rate) {
    state_->set_sample_rate(rate);
  }

  // The parameters' names by bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const {
    return state_->reducer().bucket_names();
  }

  // For what shards gradients or parameters (zero/).
  detail::DdpState& state() { return *state_; }

 private:
  decltype(detail::ModulePointer<Module>::get(
      std::declval<typename detail::ModulePointer<Module>::Given&>())) module_;
  std::unique_ptr<detail::DdpState> state_;
};

template <typename Module>
DistributedDataParallel(Module) -> DistributedDataParallel<Module>;
template <typename Module>
DistributedDataParallel(Module, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<Module>;

}  // namespace lockstep

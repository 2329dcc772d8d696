#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <utility>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/reducer.h"

namespace lockstep {

// After torch.nn.parallel.DistributedDataParallel (PyTorch documentation).
struct DistributedDataParallelOptions {
  // Whether the constructor, and each forward behind a backward that averaged,
  // begins with rank 0's buffers (running statistics) on every rank.
  bool broadcast_buffers{true};
  // Whether the constructor checks that the ranks' models are alike and gives
  // every rank rank 0's parameters and buffers.
  bool init_sync{true};
  ProcessGroupPtr process_group{};  // none: the default group
  // MiB of gradients that are reduced together; none: 25. Larger moves more at
  // once, smaller starts earlier.
  std::optional<double> bucket_cap_mb{};
  // The same of the first bucket, whose reduction is to begin early in
  // backward. None, as in Python: 1, or bucket_cap_mb where that is given.
  std::optional<double> first_bucket_mb{};
};

namespace detail {

// What of DistributedDataParallel does not depend on the module's type.
class DdpState {
 public:
  // Collective.
  DdpState(torch::nn::Module& module, DistributedDataParallelOptions options);

  // Before the module's forward. Collective if it has buffers to broadcast.
  void before_forward();

  const Reducer& reducer() const { return *reducer_; }

  bool require_backward_grad_sync = true;

 private:
  DistributedDataParallelOptions options_;
  std::vector<at::Tensor> buffers_;
  std::unique_ptr<Reducer> reducer_;
  // As in Python: buffers travel only after a forward that was trained on.
  bool require_forward_buffer_sync_ = true;
};

template <typename Module>
struct ModulePointer {  // a holder, as TORCH_MODULE makes it
  static auto get(const Module& module) { return module.ptr(); }
};
template <typename Impl>
struct ModulePointer<std::shared_ptr<Impl>> {
  static auto get(const std::shared_ptr<Impl>& module) { return module; }
};

}  // namespace detail

// Data-parallel training of one module on every rank: its gradients are
// averaged over the ranks when backward() returns.
//
// `Module` is a module holder, a std::shared_ptr of a module, or a Sequential.
// The module is shared, not copied: parameter names are its own, without a
// "module." prefix, and optimizers take `model->parameters()`.
//
// The constructor is collective, as is every forward of a module with buffers
// (and the second one of any). Each rank must call forward and backward as
// often as the others. Blocking: backward() returns when every gradient is
// final, or throws: c10::DistBackendError of the failed all-reduce, or
// std::runtime_error that names this rank and the parameters that got no
// gradient. No thread is started.
//
// The constructor throws std::invalid_argument, on every rank, if the ranks'
// models differ, naming rank and parameter.
//
// Ranks may run Python's DistributedDataParallel over the same model, in a
// group as init_process_group() describes, if their options are the same and
// they do not find unused parameters. A parameter that is registered twice
// counts once.
//
// Use from one thread. Must outlive the backward passes of its forwards.
template <typename Module>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(
      Module module, const DistributedDataParallelOptions& options = {})
      : module_(detail::ModulePointer<Module>::get(module)),
        state_(std::make_unique<detail::DdpState>(*module_, options)) {}

  // Takes and returns what the module's forward does.
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    state_->before_forward();
    return module_->forward(std::forward<Args>(args)...);
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

  // The parameters' names by bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const {
    return state_->reducer().bucket_names();
  }

 private:
  decltype(detail::ModulePointer<Module>::get(std::declval<Module&>())) module_;
  std::unique_ptr<detail::DdpState> state_;
};

}  // namespace lockstep

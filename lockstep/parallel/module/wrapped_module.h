#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class AnyModule;
}

namespace lockstep {
namespace internal {

// The argument type of a wrapper's constructor, and the shared pointer that the
// wrapper holds.
template <typename Module>
struct ModulePointer {  // a holder, as TORCH_MODULE makes it
  static_assert(
      !requires(const Module& given) { given.module(); },
      "the module is in a wrapper already; give the wrapper's "
      "module(), or use only one wrapper");
  static_assert(!std::same_as<Module, torch::nn::AnyModule>,
                "an AnyModule does not tell what its forward takes and "
                "returns; wrap the module itself, or a Sequential of it");
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

// The ways into a wrapper for other parts of Lockstep; its user has none.
struct WrapperAccess {
  // The DdpState of a DistributedDataParallel.
  template <typename Wrapper>
  static auto& state(Wrapper& wrapper) {
    return *wrapper.state_;
  }
  // The ShardedUnit of a FullyShard, as a std::shared_ptr.
  template <typename Wrapper>
  static const auto& unit(const Wrapper& wrapper) {
    return wrapper.unit_;
  }
  // Runs `forward(module, args...)` with what the wrapper does before and after
  // it, and returns its result.
  template <typename Wrapper, typename Forward, typename... Args>
  static decltype(auto) run(Wrapper& wrapper, const Forward& forward,
                            Args&&... args) {
    return wrapper.run(forward, std::forward<Args>(args)...);
  }
};

// Returns the module that `given` is or has: a module itself; the `module()`
// of a wrapper, such as DistributedDataParallel; what a holder or a shared_ptr
// points to, even if that is const.
template <typename Given>
torch::nn::Module& module_of(const Given& given) {
  if constexpr (std::derived_from<Given, torch::nn::Module>) {
    return const_cast<Given&>(given);
  } else if constexpr (requires { given.module(); }) {
    return module_of(given.module());
  } else if constexpr (requires { given.ptr(); }) {
    return *given.ptr();
  } else {
    return *given;
  }
}

}  // namespace internal

// The argument of a wrapper's constructor: the module's holder or
// std::shared_ptr.
template <typename Module>
using ModuleHandle = typename internal::ModulePointer<Module>::Given;

// The result of a wrapper's no_sync(): gradients stay on this rank while it
// lives.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::function<void()> end) : end_(std::move(end)) {}
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
  ~NoSync() { end_(); }

 private:
  std::function<void()> end_;
};

// The members of a module that DistributedDataParallel, FullyShard and
// DataParallel have, too. To its user a wrapper is the module: `model(x)` and
// LibTorch's other spelling, `model->forward(x)`, are both the parallel
// forward, since `model->` gives the wrapper itself. The names of parameters
// and buffers are the module's own, without a "module." prefix. What else the
// module has, such as members of a class of your own, is reached through
// module(): `model.module()->fc1`.
//
// A wrapper does not convert to its module: a function that calls the forward
// of what it gets would train this rank alone.
template <typename Wrapper, typename Module>
class WrappedModule {
  using Pointer = internal::ModulePointer<Module>;

 public:
  Wrapper* operator->() { return static_cast<Wrapper*>(this); }
  const Wrapper* operator->() const {
    return static_cast<const Wrapper*>(this);
  }

  // Takes the arguments of the module's forward and returns its result.
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    constexpr auto call = [](auto& module, auto&&... given)
        -> decltype(module.forward(std::forward<decltype(given)>(given)...)) {
      return module.forward(std::forward<decltype(given)>(given)...);
    };
    return run(call, std::forward<Args>(args)...);
  }
  // The same for a module whose forward takes the type of its result, as that
  // of a Sequential which ends in a recurrent layer.
  template <typename Result, typename... Args>
  Result forward(Args&&... args) {
    return run(
        [](auto& module, auto&&... given) -> Result
          requires requires {
            module.template forward<Result>(
                std::forward<decltype(given)>(given)...);
          }
        {
          return module.template forward<Result>(
              std::forward<decltype(given)>(given)...);
        },
        std::forward<Args>(args)...);
  }
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The std::shared_ptr of the wrapped module. Its forward is that of one
  // process: nothing is averaged or gathered.
  const auto& module() const { return module_; }

  // The same as those of torch::nn::Module.
  std::vector<at::Tensor> parameters(bool recurse = true) const {
    return module_->parameters(recurse);
  }
  torch::OrderedDict<std::string, at::Tensor> named_parameters(
      bool recurse = true) const {
    return module_->named_parameters(recurse);
  }
  std::vector<at::Tensor> buffers(bool recurse = true) const {
    return module_->buffers(recurse);
  }
  torch::OrderedDict<std::string, at::Tensor> named_buffers(
      bool recurse = true) const {
    return module_->named_buffers(recurse);
  }
  std::vector<std::shared_ptr<torch::nn::Module>> modules(
      bool include_self = true) const {
    return module_->modules(include_self);
  }
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>
  named_modules(const std::string& name_prefix = {},
                bool include_self = true) const {
    return module_->named_modules(name_prefix, include_self);
  }
  std::vector<std::shared_ptr<torch::nn::Module>> children() const {
    return module_->children();
  }
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>
  named_children() const {
    return module_->named_children();
  }
  const std::string& name() const { return module_->name(); }
  bool is_training() const noexcept { return module_->is_training(); }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  void zero_grad(bool set_to_none = true) { module_->zero_grad(set_to_none); }
  friend std::ostream& operator<<(std::ostream& out, const Wrapper& wrapper) {
    return out << *wrapper.module();
  }
  // A device, a dtype or both. On all ranks alike, between two iterations.
  template <typename... Args>
  void to(Args&&... args) {
    module_->to(std::forward<Args>(args)...);
  }

 protected:
  explicit WrappedModule(const ModuleHandle<Module>& module)
      : module_(Pointer::get(module)) {}

 private:
  template <typename Forward, typename... Args>
  decltype(auto) run(const Forward& forward, Args&&... args) {
    return internal::WrapperAccess::run(static_cast<Wrapper&>(*this), forward,
                                        std::forward<Args>(args)...);
  }

  decltype(Pointer::get(std::declval<const ModuleHandle<Module>&>())) module_;
};

}  // namespace lockstep

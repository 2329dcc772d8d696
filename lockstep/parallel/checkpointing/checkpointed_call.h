#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/parallel/checkpointing/checkpoint_options.h"
#include "lockstep/parallel/checkpointing/forward_conditions.h"
#include "lockstep/parallel/module/forward_result.h"

namespace lockstep::internal {

// A call of a function that backward can make again. It keeps the function and
// all arguments except the tensors in them, which autograd keeps.
class CheckpointedCall {
 public:
  virtual ~CheckpointedCall() = default;

  // Calls the function with `inputs` in the places of the tensors of the first
  // call.
  virtual void again(std::vector<at::Tensor> inputs) = 0;
};

// Calls a module's forward, or else anything that can be called. Wrappers that
// have a forward of their own (FullyShard) are called themselves: what they
// point to is the module without what they do around it.
template <typename Function, typename... Args>
decltype(auto) call_forward(Function& function, Args&&... args) {
  if constexpr (requires { function.forward(std::forward<Args>(args)...); }) {
    return function.forward(std::forward<Args>(args)...);
  } else if constexpr (requires {
                         function->forward(std::forward<Args>(args)...);
                       }) {
    return function->forward(std::forward<Args>(args)...);
  } else {
    return std::invoke(function, std::forward<Args>(args)...);
  }
}

// Takes the tensors out of a value and puts others into the same places.
class TensorPlaces {
 public:
  // Moves the defined tensors out of `value`, except those that it does not
  // own.
  template <typename T>
  std::vector<at::Tensor> take(T& value) {
    std::vector<at::Tensor> taken;
    visit_tensors(value, [&]<typename Tensor>(Tensor& tensor) {
      if constexpr (!std::is_const_v<Tensor>) {
        is_taken_.push_back(tensor.defined());
        if (!tensor.defined()) return;
        taken.push_back(std::exchange(tensor, at::Tensor()));
      }
    });
    return taken;
  }

  // `tensors`: as many as were taken. `value` may be a copy.
  template <typename T>
  void put(T& value, std::vector<at::Tensor> tensors) const {
    size_t place = 0;
    auto next = tensors.begin();
    visit_tensors(value, [&]<typename Tensor>(Tensor& tensor) {
      if constexpr (!std::is_const_v<Tensor>) {
        if (is_taken_[place++]) tensor = std::move(*next++);
      }
    });
  }

 private:
  std::vector<bool> is_taken_;
};

// Returns the module that the function is or has; null if it has none.
template <typename Function>
const torch::nn::Module* module_in(const Function& function) {
  if constexpr (requires { function.module(); }) {
    return module_in(function.module());
  } else if constexpr (requires { function->named_parameters(); }) {
    return &*function;
  } else {
    return nullptr;
  }
}

// One argument of a call; its tensors are found if its type is known.
template <typename T>
struct Argument {
  T value;
};

// Types that do not own what they give.
template <typename T>
constexpr bool is_borrowed = false;
template <typename T>
constexpr bool is_borrowed<c10::ArrayRef<T>> = true;
template <typename T, size_t N>
constexpr bool is_borrowed<std::span<T, N>> = true;
template <typename C, typename T>
constexpr bool is_borrowed<std::basic_string_view<C, T>> = true;

// `Function`, `Args`: as checkpoint() deduces them.
template <typename Function, typename... Args>
class TypedCall final : public CheckpointedCall {
  using Kept = std::decay_t<Function>;

 public:
  using Result = std::decay_t<decltype(call_forward(std::declval<Kept&>(),
                                                    std::declval<Args>()...))>;
  static_assert(!std::is_void_v<Result>,
                "checkpoint: the function must return what it computes");
  static_assert((std::is_copy_constructible_v<std::decay_t<Args>> && ...),
                "checkpoint: arguments are kept for the recomputation, so they "
                "must be copyable; let the function capture others");
  static_assert(!(is_borrowed<std::decay_t<Args>> || ...),
                "checkpoint: arguments are kept for the recomputation, so they "
                "must own what they hold; give a std::vector or std::string");

  explicit TypedCall(Function&& function,
                     std::remove_reference_t<Args>&... args)
      : function_(std::forward<Function>(function)),
        args_(Argument<std::decay_t<Args>>{args}...),
        tensors_(places_.take(args_)) {}

  // Returns the tensors of the arguments, once.
  std::vector<at::Tensor> take_tensors() { return std::move(tensors_); }

  template <typename... Given>
  Result first(Given&&... args) {
    const auto since = at::sequence_number::peek();
    Result result = call_forward(function_, std::forward<Given>(args)...);
    if constexpr (has_known_tensors<Result>()) {
      if (module_in(function_) == nullptr) {
        std::vector<at::Tensor> tensors;
        visit_tensors(result, [&](const at::Tensor& tensor) {
          if (tensor.defined()) tensors.push_back(tensor);
        });
        leaves_ = leaves_since(tensors, since);
      }
    }
    return result;
  }

  void again(std::vector<at::Tensor> inputs) override {
    auto args = args_;
    places_.put(args, std::move(inputs));
    const ParameterVersions parameters(module_in(function_), leaves_);
    try {
      [&]<size_t... I>(std::index_sequence<I...>) {
        static_cast<void>(
            call_forward(function_, given<Args>(std::get<I>(args))...));
      }(std::index_sequence_for<Args...>());
    } catch (...) {  // it may have what it needs
      parameters.require_unchanged();
      throw;
    }
    parameters.require_unchanged();
  }

 private:
  // The argument as the first call had it: a reference to an lvalue or rvalue.
  template <typename Arg>
  static decltype(auto) given(Argument<std::decay_t<Arg>>& argument) {
    if constexpr (std::is_array_v<std::remove_reference_t<Arg>>) {
      return (argument.value);
    } else {
      return static_cast<Arg&&>(argument.value);
    }
  }

  Kept function_;
  std::tuple<Argument<std::decay_t<Args>>...> args_;
  TensorPlaces places_;
  std::vector<at::Tensor> tensors_;
  // The leaves of the results, if the function is not a module.
  std::vector<at::Tensor> leaves_;
};

// Runs `first`, which makes the call, so that autograd records it and keeps
// nothing that its operations save (region.h). `inputs`: the tensors of the
// call's arguments. Throws std::invalid_argument if the call has changed one of
// them in place.
void recorded_checkpoint(const CheckpointOptions& options,
                         std::unique_ptr<CheckpointedCall> call,
                         const std::function<void()>& first,
                         const std::vector<at::Tensor>& inputs);

// The body of checkpoint().
template <typename Function, typename... Args>
auto checkpointed(const CheckpointOptions& options, Function&& function,
                  Args&&... args) {
  using Call = TypedCall<Function, Args...>;
  using Result = typename Call::Result;
  if (!at::GradMode::is_enabled()) {
    std::decay_t<Function> own(std::forward<Function>(function));
    return Result(call_forward(own, std::forward<Args>(args)...));
  }
  auto owned =
      std::make_unique<Call>(std::forward<Function>(function), args...);
  auto& call = *owned;
  const auto inputs = call.take_tensors();
  std::optional<Result> result;
  recorded_checkpoint(
      options, std::move(owned),
      [&] { result.emplace(call.first(std::forward<Args>(args)...)); }, inputs);
  return *std::move(result);
}

}  // namespace lockstep::internal

template <typename T>
struct lockstep::ForwardResult<lockstep::internal::Argument<T>> {
  template <typename Visit>
  static void visit(lockstep::internal::Argument<T>& argument,
                    const Visit& visit_part) {
    if constexpr (has_known_tensors<T>()) visit_part(argument.value);
  }
};

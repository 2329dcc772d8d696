#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/parallel/checkpointing/input_versions.h"
#include "lockstep/parallel/module/forward_result.h"

namespace lockstep::internal {

// A call of a function that backward can make again. It keeps the function and
// all arguments except the tensors in them, which autograd keeps.
class CheckpointedCall {
 public:
  virtual ~CheckpointedCall() = default;

  // Calls the function with `inputs` in the places of the tensors of the first
  // call. Returns the tensors of its result, without the undefined ones; none
  // if the type of the result is not known (forward_result.h).
  virtual std::vector<at::Tensor> again(std::vector<at::Tensor> inputs) = 0;
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
  // Moves the defined tensors out of `value`, and calls `shared` with those
  // that it does not own; they stay where they are.
  template <typename T, typename Shared>
  std::vector<at::Tensor> take(T& value, const Shared& shared) {
    std::vector<at::Tensor> taken;
    visit_tensors(value, [&]<typename Tensor>(Tensor& tensor) {
      if constexpr (std::is_const_v<Tensor>) {
        shared(tensor);
      } else {
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

// Called with the tensors that a result does not own, in the re-entrant form.
inline void refuse_shared_result(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  throw std::invalid_argument(
      "checkpoint: with use_reentrant the function must not return a tensor in "
      "a std::shared_ptr; return the tensor itself, or set use_reentrant to "
      "false");
}

// Called with the tensors that the function has put into reference arguments,
// in the re-entrant form.
inline void refuse_written(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating_point()) return;
  throw std::invalid_argument(
      "checkpoint: with use_reentrant the function has put a tensor into a "
      "reference argument, where no gradient would reach it; return it, or set "
      "use_reentrant to false");
}

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

  // `use_reentrant`: throws std::invalid_argument if an argument shares a
  // tensor that requires grad.
  TypedCall(Function&& function, bool use_reentrant,
            std::remove_reference_t<Args>&... args)
      : function_(std::forward<Function>(function)),
        args_(Argument<std::decay_t<Args>>{args}...) {
    tensors_ = places_.take(args_, [&](const at::Tensor& tensor) {
      if (!use_reentrant || !tensor.defined() || !tensor.requires_grad()) {
        return;
      }
      throw std::invalid_argument(
          "checkpoint: with use_reentrant gradients do not reach a tensor that "
          "an argument holds by a std::shared_ptr; give the tensor itself, or "
          "set use_reentrant to false");
    });
  }

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

  std::vector<at::Tensor> again(std::vector<at::Tensor> inputs) override {
    auto args = args_;
    places_.put(args, std::move(inputs));
    const ParameterVersions parameters(module_in(function_), leaves_);
    auto result = [&]<size_t... I>(std::index_sequence<I...>) -> Result {
      try {
        return call_forward(function_, given<Args>(std::get<I>(args))...);
      } catch (...) {  // it may have what it needs
        parameters.require_unchanged();
        throw;
      }
    }(std::index_sequence_for<Args...>());
    parameters.require_unchanged();
    if constexpr (has_known_tensors<Result>()) {
      return TensorPlaces().take(result, [](const at::Tensor&) {});
    } else {
      return {};
    }
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
  std::vector<at::Tensor> leaves_;  // of the results, without use_reentrant
};

}  // namespace lockstep::internal

template <typename T>
struct lockstep::ForwardResult<lockstep::internal::Argument<T>> {
  template <typename Visit>
  static void visit(lockstep::internal::Argument<T>& argument,
                    const Visit& visit_part) {
    if constexpr (has_known_tensors<T>()) visit_part(argument.value);
  }
};

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/comm/version_of.h"
#include "lockstep/parallel/module/forward_result.h"

namespace lockstep::internal {

// Whether a wrapper finds the tensors in an argument of this type: tensors;
// types for which ForwardResult is specialised (forward_result.h); vectors,
// arrays, optionals, maps, pairs and tuples of these. Other arguments are
// passed on as they are.
template <typename T>
    struct HoldsTensors : std::bool_constant < !requires {
  ForwardResult<T>::is_known;
} > {};
template <>
struct HoldsTensors<at::Tensor> : std::true_type {};
template <>
struct HoldsTensors<std::string> : std::false_type {};
template <typename T>
struct HoldsTensors<std::optional<T>> : HoldsTensors<T> {};
template <typename T, typename A>
struct HoldsTensors<std::vector<T, A>> : HoldsTensors<T> {};
template <typename T, size_t N>
struct HoldsTensors<std::array<T, N>> : HoldsTensors<T> {};
template <typename K, typename T, typename... Rest>
struct HoldsTensors<std::map<K, T, Rest...>> : HoldsTensors<T> {};
template <typename K, typename T, typename... Rest>
struct HoldsTensors<std::unordered_map<K, T, Rest...>> : HoldsTensors<T> {};
template <typename... T>
struct HoldsTensors<std::tuple<T...>>
    : std::bool_constant<(HoldsTensors<T>::value || ...) &&
                         has_known_tensors<std::tuple<T...>>()> {};
template <typename A, typename B>
struct HoldsTensors<std::pair<A, B>> : HoldsTensors<std::tuple<A, B>> {};

// Whether forward may put tensors into an argument of the caller's.
template <typename Argument>
constexpr bool is_caller_argument =
    HoldsTensors<std::decay_t<Argument>>::value &&
    std::is_lvalue_reference_v<Argument> &&
    !std::is_const_v<std::remove_reference_t<Argument>>;

// An argument on its way to forward: a copy if its tensors may be replaced, and
// it is not the caller's.
template <typename Argument>
using HeldArgument =
    std::conditional_t<HoldsTensors<std::decay_t<Argument>>::value &&
                           !is_caller_argument<Argument>,
                       std::decay_t<Argument>, Argument&&>;

// The arguments of a forward. `Args`: as a wrapper's forward deduces them. What
// forward puts into the variables of the caller, such as `torch::Tensor& state`
// or `std::vector<torch::Tensor>& losses`, stays there: these tensors are
// results as those that it returns.
template <typename... Args>
class ForwardArguments {
 public:
  explicit ForwardArguments(Args&&... args)
      : held_(std::forward<Args>(args)...) {
    visit_caller([this](const at::Tensor& tensor) {
      if (tensor.defined()) before_.push_back(tensor);
    });
  }
  ForwardArguments(const ForwardArguments&) = delete;
  ForwardArguments& operator=(const ForwardArguments&) = delete;
  ~ForwardArguments() { put_back(); }

  // Calls `replace` with pointers to the defined tensors, which it may replace.
  // Forward gets the replacements; put_back() ends that.
  template <typename Replace>
  void replace(const Replace& replace) {
    std::vector<at::Tensor*> places;
    visit<false>([&](at::Tensor& tensor) {
      if (tensor.defined()) places.push_back(&tensor);
    });
    std::vector<at::Tensor> given;
    for (const auto* place : places) given.push_back(*place);
    replace(std::as_const(places));
    for (size_t i = 0; i < places.size(); ++i) {
      const auto& other = *places[i];
      if (other.is_same(given[i])) continue;
      replaced_.push_back({.tensor = std::move(given[i]),
                           .other = other,
                           .version = version_of(other)});
    }
  }

  // Returns function(module, args...).
  template <typename Function, typename Module>
  decltype(auto) call(const Function& function, Module& module) {
    return std::apply(
        [&](auto&... args) -> decltype(auto) {
          return function(module, static_cast<Args&&>(args)...);
        },
        held_);
  }

  // Copies what forward has changed in place in replacements of other memory to
  // the tensors that they replace.
  void copy_changed() {
    for (auto& [tensor, other, version] : replaced_) {
      if (version_of(other) != version) tensor.copy_(other);
    }
  }
  // The variables of the caller have their own tensors again, except where
  // forward has put others.
  void put_back() {
    if (replaced_.empty()) return;
    visit_caller([this](at::Tensor& tensor) {
      const auto found = std::ranges::find_if(
          replaced_,
          [&](const Replaced& one) { return one.other.is_same(tensor); });
      if (found != replaced_.end()) tensor = found->tensor;
    });
  }
  // Calls `visit` with each tensor that forward has put into a variable of the
  // caller. After put_back().
  template <typename Visit>
  void visit_written(const Visit& visit) {
    visit_caller([&](at::Tensor& tensor) {
      if (!tensor.defined() ||
          std::ranges::any_of(before_, [&](const at::Tensor& before) {
            return before.is_same(tensor);
          })) {
        return;
      }
      visit(tensor);
    });
  }

 private:
  struct Replaced {
    at::Tensor tensor;
    at::Tensor other;
    int64_t version;
  };

  template <bool only_caller, typename Visit>
  void visit(const Visit& visit) {
    std::apply(
        [&](auto&... args) {
          (
              [&] {
                if constexpr (only_caller
                                  ? is_caller_argument<Args>
                                  : HoldsTensors<std::decay_t<Args>>::value) {
                  visit_tensors(args, [&]<typename T>(T& tensor) {
                    if constexpr (!std::is_const_v<T>) visit(tensor);
                  });
                }
              }(),
              ...);
        },
        held_);
  }
  template <typename Visit>
  void visit_caller(const Visit& visit) {
    this->template visit<true>(visit);
  }

  std::tuple<HeldArgument<Args>...> held_;
  std::vector<at::Tensor> before_;  // in the variables of the caller
  std::vector<Replaced> replaced_;
};

// Calls then(result) with the result of function(), or then() if that is void,
// and returns the result. A result that is a reference is const for `then`.
template <typename Function, typename Then>
decltype(auto) call_then(const Function& function, const Then& then) {
  using Result = decltype(function());
  if constexpr (std::is_void_v<Result>) {
    function();
    then();
  } else {
    Result result = function();
    if constexpr (std::is_reference_v<Result>) {
      then(std::as_const(result));
    } else {
      then(result);
    }
    return static_cast<Result>(std::forward<Result>(result));
  }
}

}  // namespace lockstep::internal

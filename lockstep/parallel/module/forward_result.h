#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace torch::nn {
struct ASMoutput;
}

namespace lockstep {

// Finds the tensors in the result of a module's forward; by them
// DistributedDataParallel recognises the backward passes of its own forwards
// (backward_tracker.h), and checkpoint() gives them their gradients
// (../checkpointing/checkpoint.h). It knows tensors; standard tuples, pairs,
// arrays, vectors, maps, optionals, variants and smart pointers of known types;
// AdaptiveLogSoftmaxWithLoss's result; strings and numbers, which hold no
// tensors.
//
// A forward that returns a type of your own does not compile until you
// specialise this template for the type:
//
//   template <>
//   struct lockstep::ForwardResult<Output> {
//     template <typename Visit>
//     static void visit(Output& output, const Visit& visit_part) {
//       visit_part(output.logits);
//       visit_part(output.hidden_states);  // a vector of tensors, say
//     }
//   };
//
// If forward returns a parameter itself, or a tensor that was computed from
// parameters before, the wrapper replaces it by an alias, so that it recognises
// graphs that begin there. Such a tensor must be returned by value, and not
// through a std::shared_ptr, whose target others may hold.
template <typename T>
struct ForwardResult {
  // A specialisation without this member is complete.
  static constexpr bool is_known = std::is_arithmetic_v<T> || std::is_enum_v<T>;
  template <typename Visit>
  static void visit(const T&, const Visit&) {
    static_assert(is_known,
                  "Lockstep must find the tensors in what forward returns: "
                  "specialise lockstep::ForwardResult for this type "
                  "(lockstep/parallel/module/forward_result.h)");
  }
};

// Whether visit_tensors() compiles for a T.
template <typename T>
constexpr bool has_known_tensors() {
  using Result = ForwardResult<std::remove_const_t<T>>;
  if constexpr (std::is_convertible_v<T&, const at::Tensor&>) {
    return true;
  } else if constexpr (requires { Result::is_known; }) {
    return Result::is_known;
  } else {
    return true;
  }
}

// Calls `visit` with every tensor in `result`, including undefined ones;
// tensors that the result does not own are const.
template <typename T, typename Visit>
void visit_tensors(T& result, const Visit& visit) {
  if constexpr (std::is_convertible_v<T&, at::Tensor&>) {
    visit(static_cast<at::Tensor&>(result));
  } else if constexpr (std::is_convertible_v<T&, const at::Tensor&>) {
    visit(static_cast<const at::Tensor&>(result));
  } else {
    ForwardResult<std::remove_const_t<T>>::visit(
        result, [&](auto& part) { visit_tensors(part, visit); });
  }
}

template <>
struct ForwardResult<std::string> {
  template <typename Visit>
  static void visit(const std::string&, const Visit&) {}
};
template <>
struct ForwardResult<std::vector<bool>> {
  template <typename Visit>
  static void visit(const std::vector<bool>&, const Visit&) {}
};

namespace internal {

template <typename... Part>
struct VisitParts {
  static constexpr bool is_known = (has_known_tensors<Part>() && ...);
};
template <typename... Part>
struct VisitMembers : VisitParts<Part...> {
  template <typename Tuple, typename Visit>
  static void visit(Tuple& tuple, const Visit& visit_part) {
    std::apply([&](auto&... member) { (visit_part(member), ...); }, tuple);
  }
};
template <typename Part>
struct VisitElements : VisitParts<Part> {
  template <typename Range, typename Visit>
  static void visit(Range& range, const Visit& visit_part) {
    for (auto& element : range) visit_part(element);
  }
};
template <typename Part>
struct VisitMapped : VisitParts<Part> {
  template <typename Map, typename Visit>
  static void visit(Map& map, const Visit& visit_part) {
    for (auto& [key, value] : map) visit_part(value);
  }
};
template <typename Part>
struct VisitPointee : VisitParts<Part> {
  template <typename Pointer, typename Visit>
  static void visit(Pointer& pointer, const Visit& visit_part) {
    if (pointer) visit_part(*pointer);
  }
};

}  // namespace internal

template <typename... T>
struct ForwardResult<std::tuple<T...>> : internal::VisitMembers<T...> {};
template <typename A, typename B>
struct ForwardResult<std::pair<A, B>> : internal::VisitMembers<A, B> {};
template <typename T, size_t N>
struct ForwardResult<std::array<T, N>> : internal::VisitElements<T> {};
template <typename T, typename A>
struct ForwardResult<std::vector<T, A>> : internal::VisitElements<T> {};
template <typename K, typename T, typename... Rest>
struct ForwardResult<std::map<K, T, Rest...>> : internal::VisitMapped<T> {};
template <typename K, typename T, typename... Rest>
struct ForwardResult<std::unordered_map<K, T, Rest...>>
    : internal::VisitMapped<T> {};
template <typename T>
struct ForwardResult<std::optional<T>> : internal::VisitPointee<T> {};
template <typename T, typename D>
struct ForwardResult<std::unique_ptr<T, D>> : internal::VisitPointee<T> {};
template <typename T>
struct ForwardResult<std::shared_ptr<T>> : internal::VisitParts<T> {
  template <typename Visit>
  static void visit(const std::shared_ptr<T>& pointer,
                    const Visit& visit_part) {
    if (pointer) visit_part(std::as_const(*pointer));
  }
};
template <typename... T>
struct ForwardResult<std::variant<T...>> : internal::VisitParts<T...> {
  template <typename Variant, typename Visit>
  static void visit(Variant& result, const Visit& visit_part) {
    std::visit(visit_part, result);
  }
};
template <>
struct ForwardResult<torch::nn::ASMoutput> {
  template <typename Output, typename Visit>
  static void visit(Output& result, const Visit& visit_part) {
    visit_part(result.output);
    visit_part(result.loss);
  }
};
template <>
struct ForwardResult<std::monostate> {
  template <typename Visit>
  static void visit(const std::monostate&, const Visit&) {}
};

}  // namespace lockstep

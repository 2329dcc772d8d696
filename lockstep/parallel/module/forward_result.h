#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

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

}  // namespace lockstep

// The types that it knows.
#include "lockstep/parallel/module/known_results.h"  // IWYU pragma: export

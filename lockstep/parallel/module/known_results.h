#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/parallel/module/forward_result.h"

namespace torch::nn {
struct ASMoutput;
}

// The results of forward that ForwardResult knows.
namespace lockstep {

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

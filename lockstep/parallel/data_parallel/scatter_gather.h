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

namespace torch::nn {
struct ASMoutput;
}

// Divides the arguments of DataParallel's forward and joins its results.
namespace lockstep {

// Divides the arguments of one call over devices.
class Scatter {
 public:
  // `devices`: not empty. `dim`: the dimension of each tensor; negative numbers
  // count from its end.
  Scatter(std::vector<at::Device> devices, int64_t dim);

  // Divides as at::chunk does: pieces along the dimension, each of ceil(size /
  // devices) rows except the last, and no more pieces than rows (one piece for
  // a tensor without rows). Piece i is a copy on device i. If there is one
  // device, and `tensor` is on it, the piece is `tensor` itself. A second call
  // with the same tensor returns the same pieces. Differentiable, also twice.
  //
  // Throws std::invalid_argument for a tensor without dimensions, and for a
  // tensor that makes another number of pieces than an earlier one of this call
  // (Python drops the additional rows).
  std::vector<at::Tensor> divide(const at::Tensor& tensor);

  // Called after forward: writes into the divided tensors what the replicas
  // have changed in place in their pieces, with its history, so that values and
  // gradients are those of one process, or autograd throws as there.
  void put_back() const;

  size_t devices() const { return devices_.size(); }
  // Returns how many replicas this call needs: the number of pieces, or every
  // device if no tensor was divided.
  size_t parts() const { return parts_.value_or(devices_.size()); }

 private:
  std::vector<at::Device> devices_;
  int64_t dim_;
  std::optional<size_t> parts_;
  std::string first_shape_;  // of the tensor that set parts_, for the error
  struct Divided {
    at::Tensor tensor;
    std::vector<at::Tensor> pieces;
    std::vector<int64_t> versions;  // of the pieces
    std::vector<c10::intrusive_ptr<torch::autograd::Node>> nodes;  // grad_fn()
  };
  std::vector<Divided> divided_;
};

// The device and dimension for joining the parts of a result.
struct GatherTarget {
  at::Device device;
  int64_t dim;
  // Whether scalars of several replicas become a vector.
  bool scalars_to_vector = true;
};

// Defines what DataParallel does with an argument or result of type T. This
// general template is for types without tensors: an argument is copied to all
// replicas, a result is a compiler error. The specialisations below divide and
// concatenate tensors, and treat tuples, pairs, vectors and maps member by
// member. Specialise it for types of your own.
template <typename T>
struct DataParallelValue {
  static constexpr bool divides = false;

  // Returns one T for each part, or for each device if T has nothing to divide.
  static std::vector<T> scatter(const T& value, Scatter& over) {
    return std::vector<T>(over.devices(), value);
  }
  // `parts`: one result of each replica, in their order; not empty.
  static T gather(std::vector<T> parts, const GatherTarget&) {
    static_assert(!std::is_same_v<T, T>,
                  "DataParallel joins tensors, and tuples, pairs, vectors and "
                  "maps of them. Specialise lockstep::DataParallelValue for a "
                  "result of another type.");
    return std::move(parts.front());
  }
};

template <>
struct DataParallelValue<at::Tensor> {
  static constexpr bool divides = true;
  // An undefined tensor goes to all replicas.
  static std::vector<at::Tensor> scatter(const at::Tensor& value,
                                         Scatter& over);
  // Scalars become a vector with one element for each replica if `target.dim`
  // is 0.
  static at::Tensor gather(const std::vector<at::Tensor>& parts,
                           const GatherTarget& target);
};

// AdaptiveLogSoftmaxWithLoss's result; its loss becomes that of all rows.
template <>
struct DataParallelValue<torch::nn::ASMoutput> {
  static constexpr bool divides = true;
  static torch::nn::ASMoutput gather(
      const std::vector<torch::nn::ASMoutput>& parts,
      const GatherTarget& target);
};

template <typename T>
struct DataParallelValue<c10::ArrayRef<T>> {
  static_assert(!std::is_same_v<T, at::Tensor>,
                "DataParallel divides a std::vector of tensors, not a "
                "TensorList, which owns nothing.");
};

namespace internal {

// Throws std::invalid_argument if two parts differ in size.
void require_same_size(size_t first, size_t other, const char* container);
// Throws std::invalid_argument: a map's key is not in every replica's result.
[[noreturn]] void throw_missing_key();
void require_same_presence(bool first, bool other);

// For the members of tuples or pairs.
template <typename T, size_t... I>
struct MemberwiseValue {
  template <size_t J>
  using Member = DataParallelValue<std::tuple_element_t<J, T>>;

  static std::vector<T> scatter(const T& value, Scatter& over) {
    // Braces evaluate from first to last, so that errors are always the same.
    [[maybe_unused]] std::tuple<std::vector<std::tuple_element_t<I, T>>...>
        members{Member<I>::scatter(std::get<I>(value), over)...};
    const size_t count =
        std::min({over.devices(), std::get<I>(members).size()...});
    std::vector<T> parts;
    parts.reserve(count);
    for (size_t part = 0; part < count; ++part) {
      parts.push_back(T{std::move(std::get<I>(members)[part])...});
    }
    return parts;
  }
  static T gather(std::vector<T> parts, const GatherTarget& target) {
    return T{gather_member<I>(parts, target)...};
  }

 private:
  template <size_t J>
  static auto gather_member(std::vector<T>& parts, const GatherTarget& target) {
    std::vector<std::tuple_element_t<J, T>> members;
    members.reserve(parts.size());
    for (auto& part : parts) members.push_back(std::move(std::get<J>(part)));
    return Member<J>::gather(std::move(members), target);
  }
};

template <typename T, typename Indices>
struct MemberwiseOf;
template <typename T, size_t... I>
struct MemberwiseOf<T, std::index_sequence<I...>> {
  using type = MemberwiseValue<T, I...>;
};
template <typename T>
using Memberwise =
    typename MemberwiseOf<T,
                          std::make_index_sequence<std::tuple_size_v<T>>>::type;

}  // namespace internal

template <typename... T>
struct DataParallelValue<std::tuple<T...>>
    : internal::Memberwise<std::tuple<T...>> {
  static constexpr bool divides = (DataParallelValue<T>::divides || ...);
};
template <typename A, typename B>
struct DataParallelValue<std::pair<A, B>>
    : internal::Memberwise<std::pair<A, B>> {
  static constexpr bool divides =
      DataParallelValue<A>::divides || DataParallelValue<B>::divides;
};
template <typename K, typename T, typename... Rest>
struct DataParallelValue<std::map<K, T, Rest...>> {
  using Map = std::map<K, T, Rest...>;
  static constexpr bool divides = DataParallelValue<T>::divides;

  static std::vector<Map> scatter(const Map& value, Scatter& over) {
    if (!divides || value.empty()) {
      return std::vector<Map>(over.devices(), value);
    }
    std::vector<Map> parts;
    for (const auto& [key, member] : value) {
      auto pieces = DataParallelValue<T>::scatter(member, over);
      if (parts.empty()) parts.resize(pieces.size());
      parts.resize(std::min(parts.size(), pieces.size()));
      for (size_t part = 0; part < parts.size(); ++part) {
        parts[part].emplace(key, std::move(pieces[part]));
      }
    }
    return parts;
  }
  static Map gather(std::vector<Map> parts, const GatherTarget& target) {
    for (const auto& part : parts) {
      internal::require_same_size(parts.front().size(), part.size(), "map");
    }
    Map joined;
    for (const auto& member : parts.front()) {
      std::vector<T> members;
      for (auto& part : parts) {
        auto found = part.find(member.first);
        if (found == part.end()) internal::throw_missing_key();
        members.push_back(found->second);
      }
      joined.emplace(member.first,
                     DataParallelValue<T>::gather(std::move(members), target));
    }
    return joined;
  }
};

template <typename T>
struct DataParallelValue<std::vector<T>> {
  static constexpr bool divides = DataParallelValue<T>::divides;

  static std::vector<std::vector<T>> scatter(const std::vector<T>& value,
                                             Scatter& over) {
    if (!divides || value.empty()) {
      return std::vector<std::vector<T>>(over.devices(), value);
    }
    std::vector<std::vector<T>> parts(over.devices());
    for (const auto& member : value) {
      auto pieces = DataParallelValue<T>::scatter(member, over);
      parts.resize(std::min(parts.size(), pieces.size()));
      for (size_t part = 0; part < parts.size(); ++part) {
        parts[part].push_back(std::move(pieces[part]));
      }
    }
    return parts;
  }
  static std::vector<T> gather(std::vector<std::vector<T>> parts,
                               const GatherTarget& target) {
    std::vector<T> joined;
    for (const auto& part : parts) {
      internal::require_same_size(parts.front().size(), part.size(), "vector");
    }
    for (size_t i = 0; i < parts.front().size(); ++i) {
      std::vector<T> members;
      members.reserve(parts.size());
      for (auto& part : parts) members.push_back(std::move(part[i]));
      joined.push_back(
          DataParallelValue<T>::gather(std::move(members), target));
    }
    return joined;
  }
};

// Refuses containers of tensors that would be copied whole to every replica.
template <typename T>
  requires DataParallelValue<T>::divides
struct DataParallelValue<std::optional<T>> {
  static_assert(!std::is_same_v<T, T>,
                "DataParallel divides no std::optional of tensors; give the "
                "tensor itself, undefined if there is none.");
};
template <typename T, size_t N>
  requires DataParallelValue<T>::divides
struct DataParallelValue<std::array<T, N>> {
  static_assert(!std::is_same_v<T, T>,
                "DataParallel divides no std::array of tensors; give a "
                "std::vector or a std::tuple.");
};
template <typename K, typename T, typename... Rest>
  requires DataParallelValue<T>::divides
struct DataParallelValue<std::unordered_map<K, T, Rest...>> {
  static_assert(!std::is_same_v<T, T>,
                "DataParallel divides no std::unordered_map of tensors; give a "
                "std::map.");
};

}  // namespace lockstep

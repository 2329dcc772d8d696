#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/parallel/data_parallel/scatter_gather.h"

// How DataParallel divides and joins standard containers.
namespace lockstep {

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

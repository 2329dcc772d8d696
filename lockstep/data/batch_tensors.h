#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

#include <array>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::internal {

// Finds the tensors of a batch, so that the loader can pin them and move them
// to a device: those in a tensor, pair, tuple, torch::data::Example, map,
// vector or array, and in what those hold; and those of a type with a function
// for_each_tensor(batch, visit) in its namespace.
//
// visit_batch(batch, visit) calls `visit(at::Tensor&)` for each;
// kFindsTensors<T> is false if the tensors of a T cannot be found. Numbers and
// strings have none.
template <class T>
struct TensorsOf {
  static constexpr bool kKnown =
      std::is_arithmetic_v<T> || std::is_same_v<T, std::string>;
  template <class Visit>
  static void visit(T&, Visit&) {}
};

// A lookup of `for_each_tensor` that finds functions in the namespaces of its
// arguments and no others.
namespace tensors_lookup {
void for_each_tensor() = delete;
using Visit = void (*)(at::Tensor&);
template <class Batch>
concept Finds =
    requires(Batch& batch, Visit visit) { for_each_tensor(batch, visit); };
template <class Batch, class Visit>
void call(Batch& batch, Visit& visit) {
  for_each_tensor(batch, visit);
}
}  // namespace tensors_lookup

template <class T>
constexpr bool kFindsTensors =
    tensors_lookup::Finds<T> || TensorsOf<std::remove_cvref_t<T>>::kKnown;

template <class T, class Visit>
void visit_batch(T& value, Visit& visit) {
  if constexpr (tensors_lookup::Finds<T>) {
    tensors_lookup::call(value, visit);
  } else {
    TensorsOf<T>::visit(value, visit);
  }
}

template <>
struct TensorsOf<at::Tensor> {
  static constexpr bool kKnown = true;
  template <class Visit>
  static void visit(at::Tensor& tensor, Visit& visit) {
    if (tensor.defined()) visit(tensor);
  }
};

template <class First, class Second>
struct TensorsOf<std::pair<First, Second>> {
  static constexpr bool kKnown = kFindsTensors<First> && kFindsTensors<Second>;
  template <class Visit>
  static void visit(std::pair<First, Second>& pair, Visit& visit) {
    visit_batch(pair.first, visit);
    visit_batch(pair.second, visit);
  }
};

template <class... Members>
struct TensorsOf<std::tuple<Members...>> {
  static constexpr bool kKnown = (kFindsTensors<Members> && ...);
  template <class Visit>
  static void visit(std::tuple<Members...>& tuple, Visit& visit) {
    std::apply([&](auto&... each) { (visit_batch(each, visit), ...); }, tuple);
  }
};

template <class Data, class Target>
struct TensorsOf<torch::data::Example<Data, Target>> {
  static constexpr bool kKnown = kFindsTensors<Data> && kFindsTensors<Target>;
  template <class Visit>
  static void visit(torch::data::Example<Data, Target>& example, Visit& visit) {
    visit_batch(example.data, visit);
    visit_batch(example.target, visit);
  }
};

template <class Data>
struct TensorsOf<torch::data::Example<Data, void>> {
  static constexpr bool kKnown = kFindsTensors<Data>;
  template <class Visit>
  static void visit(torch::data::Example<Data, void>& example, Visit& visit) {
    visit_batch(example.data, visit);
  }
};

template <class Key, class Value, class Order>
struct TensorsOf<std::map<Key, Value, Order>> {
  static constexpr bool kKnown = kFindsTensors<Value>;
  template <class Visit>
  static void visit(std::map<Key, Value, Order>& map, Visit& visit) {
    for (auto& [key, value] : map) visit_batch(value, visit);
  }
};

template <class Element>
struct TensorsOf<std::vector<Element>> {
  static constexpr bool kKnown = kFindsTensors<Element>;
  template <class Visit>
  static void visit(std::vector<Element>& vector, Visit& visit) {
    if constexpr (!std::is_arithmetic_v<Element>) {
      for (Element& element : vector) visit_batch(element, visit);
    }
  }
};

template <class Element, size_t kLength>
struct TensorsOf<std::array<Element, kLength>> {
  static constexpr bool kKnown = kFindsTensors<Element>;
  template <class Visit>
  static void visit(std::array<Element, kLength>& array, Visit& visit) {
    for (Element& element : array) visit_batch(element, visit);
  }
};

}  // namespace lockstep::internal

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/data/example.h>

#include <algorithm>
#include <array>
#include <complex>
#include <concepts>
#include <cstddef>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::internal {

// Makes one batch of samples, as default_collate() says.
template <class Sample>
auto collate_samples(std::vector<Sample> samples);

// The dtype of the tensor that numbers of this type become.
template <class Number>
constexpr at::ScalarType dtype_of_batch() {
  if constexpr (std::same_as<Number, bool>) {
    return at::kBool;
  } else if constexpr (std::integral<Number>) {
    return at::kLong;  // Python's integers become this
  } else if constexpr (std::same_as<Number, std::complex<float>>) {
    return at::kComplexFloat;
  } else if constexpr (std::same_as<Number, std::complex<double>>) {
    return at::kComplexDouble;
  } else {
    return c10::CppTypeToScalarType<Number>::value;
  }
}

template <class T>
concept BatchNumber =
    std::integral<T> || std::same_as<T, float> || std::same_as<T, double> ||
    std::same_as<T, c10::Half> || std::same_as<T, c10::BFloat16> ||
    std::same_as<T, c10::complex<float>> ||
    std::same_as<T, c10::complex<double>> ||
    std::same_as<T, std::complex<float>> ||
    std::same_as<T, std::complex<double>>;

at::Tensor stack(std::vector<at::Tensor>&& samples);
// Returns memory for `size` numbers.
at::Tensor empty_batch(at::ScalarType dtype, size_t size);
[[noreturn]] void throw_other_keys(size_t sample);
[[noreturn]] void throw_other_length(size_t sample, size_t length,
                                     size_t first_length);

// A lookup of `collate` that finds functions in the namespaces of its arguments
// and no others.
namespace collate_lookup {
void collate() = delete;
template <class Sample>
concept Finds =
    requires(std::vector<Sample> samples) { collate(std::move(samples)); };
template <class Sample>
auto call(std::vector<Sample> samples) {
  return collate(std::move(samples));
}
}  // namespace collate_lookup

// How the samples of a type are collated; the primary template leaves them as
// they are.
template <class Sample>
struct Collating {
  static std::vector<Sample> collate(std::vector<Sample> samples) {
    return samples;
  }
};

template <>
struct Collating<at::Tensor> {
  static at::Tensor collate(std::vector<at::Tensor> samples) {
    return stack(std::move(samples));
  }
};

template <BatchNumber Number>
struct Collating<Number> {
  static at::Tensor collate(std::vector<Number> samples) {
    constexpr at::ScalarType dtype = dtype_of_batch<Number>();
    at::Tensor batch = empty_batch(dtype, samples.size());
    using Element = c10::impl::ScalarTypeToCPPTypeT<dtype>;
    Element* out = batch.mutable_data_ptr<Element>();
    for (const Number number : samples) *out++ = static_cast<Element>(number);
    return batch;
  }
};

// Collates what `member(sample)` returns a reference to.
template <class Sample, class Of>
auto collate_each(std::vector<Sample>& samples, Of member) {
  using Member = std::remove_cvref_t<decltype(member(samples.front()))>;
  std::vector<Member> members;
  members.reserve(samples.size());
  for (Sample& sample : samples) members.push_back(std::move(member(sample)));
  return collate_samples(std::move(members));
}

template <class First, class Second>
struct Collating<std::pair<First, Second>> {
  using Sample = std::pair<First, Second>;
  static auto collate(std::vector<Sample> samples) {
    return std::pair(
        collate_each(samples, [](Sample& s) -> First& { return s.first; }),
        collate_each(samples, [](Sample& s) -> Second& { return s.second; }));
  }
};

template <class... Members>
struct Collating<std::tuple<Members...>> {
  using Sample = std::tuple<Members...>;
  static auto collate(std::vector<Sample> samples) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::tuple(collate_each(
          samples, [](Sample& s) -> auto& { return std::get<I>(s); })...);
    }(std::index_sequence_for<Members...>());
  }
};

template <class Data, class Target>
struct Collating<torch::data::Example<Data, Target>> {
  using Sample = torch::data::Example<Data, Target>;
  static auto collate(std::vector<Sample> samples) {
    auto data =
        collate_each(samples, [](Sample& s) -> Data& { return s.data; });
    if constexpr (std::is_void_v<Target>) {
      return torch::data::Example<decltype(data), void>(std::move(data));
    } else {
      auto target =
          collate_each(samples, [](Sample& s) -> Target& { return s.target; });
      return torch::data::Example<decltype(data), decltype(target)>(
          std::move(data), std::move(target));
    }
  }
};

template <class Key, class Value, class Order>
struct Collating<std::map<Key, Value, Order>> {
  using Sample = std::map<Key, Value, Order>;
  static auto collate(std::vector<Sample> samples) {
    using Collated =
        decltype(collate_samples(std::declval<std::vector<Value>>()));
    std::map<Key, Collated, Order> batch;
    if (samples.empty()) return batch;
    for (size_t i = 1; i < samples.size(); ++i) {
      const bool same =
          samples[i].size() == samples[0].size() &&
          std::equal(samples[i].begin(), samples[i].end(), samples[0].begin(),
                     [](const auto& a, const auto& b) {
                       return !Order()(a.first, b.first) &&
                              !Order()(b.first, a.first);
                     });
      if (!same) throw_other_keys(i);
    }
    for (const auto& [key, value] : samples[0]) {
      std::vector<Value> values;
      values.reserve(samples.size());
      // The values of sample 0 are moved from here, its keys are not.
      for (Sample& sample : samples) {
        values.push_back(std::move(sample.find(key)->second));
      }
      batch.emplace(key, collate_samples(std::move(values)));
    }
    return batch;
  }
};

template <class Element>
struct Collating<std::vector<Element>> {
  using Sample = std::vector<Element>;
  static auto collate(std::vector<Sample> samples) {
    using Collated =
        decltype(collate_samples(std::declval<std::vector<Element>>()));
    std::vector<Collated> batch;
    if (samples.empty()) return batch;
    const size_t length = samples[0].size();
    for (size_t i = 1; i < samples.size(); ++i) {
      if (samples[i].size() != length) {
        throw_other_length(i, samples[i].size(), length);
      }
    }
    batch.reserve(length);
    for (size_t at = 0; at < length; ++at) {
      std::vector<Element> elements;
      elements.reserve(samples.size());
      for (Sample& sample : samples) {
        elements.push_back(std::move(sample[at]));
      }
      batch.push_back(collate_samples(std::move(elements)));
    }
    return batch;
  }
};

template <class Element, size_t kLength>
struct Collating<std::array<Element, kLength>> {
  using Sample = std::array<Element, kLength>;
  static auto collate(std::vector<Sample> samples) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::array{
          collate_each(samples, [](Sample& s) -> Element& { return s[I]; })...};
    }(std::make_index_sequence<kLength>());
  }
};

template <class Sample>
auto collate_samples(std::vector<Sample> samples) {
  if constexpr (collate_lookup::Finds<Sample>) {
    return collate_lookup::call(std::move(samples));
  } else {
    return Collating<Sample>::collate(std::move(samples));
  }
}

}  // namespace lockstep::internal

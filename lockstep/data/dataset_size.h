#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace lockstep::internal {

// Throws std::invalid_argument.
[[noreturn]] void throw_without_size();

// A dataset, by its size(), where a sampler takes a number.
template <class D>
concept KnowsSize = requires(const D& dataset) {
  { dataset.size() } -> std::convertible_to<std::optional<size_t>>;
};

// Throws std::invalid_argument if size() is an optional without a number.
template <class D>
int64_t size_of(D& dataset) {
  const std::optional<size_t> size = dataset.size();
  if (!size) throw_without_size();
  return static_cast<int64_t>(*size);
}

// Takes any dataset or number, as a worse choice than what a sampler takes: so
// an option in braces that there is not is refused in a few lines.
struct AnySize {
  template <class D>
  AnySize(const D&);
};

}  // namespace lockstep::internal

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/context/context_shard.h"

// Attention over parts of sequences beside attention over whole ones.
namespace lockstep::internal::testing {

struct Sequences {
  int64_t tokens = 12;
  int64_t batch = 2;
  int64_t heads = 4;
  int64_t key_heads = 4;
  int64_t head_dim = 8;
  bool is_causal = false;
  std::optional<double> scale{};
  ContextOrder order = ContextOrder::plain;
  at::ScalarType dtype = at::kDouble;
  // The lengths of the parts, in plain order; empty means those of
  // context_shard().
  std::vector<int64_t> lengths{};
  // The length of keys and values, if it differs from `tokens`.
  std::optional<int64_t> key_tokens{};
};

// Returns the text of the case for SCOPED_TRACE.
std::string describe(const Sequences& sequences);

using Attention = std::function<at::Tensor(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value)>;

// Computes softmax(scale * query . key) . value by matrix products.
at::Tensor attention_by_formula(const Sequences& sequences,
                                const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value);

// The norm of the differences from the formula in float64 over the whole
// sequences, divided by the norm of what it gives.
struct Errors {
  double output;
  double query;  // of the gradients
  double key;
  double value;
};

// Runs `attention` on this rank's parts of random sequences, forward and
// backward, on all ranks of the default group, and compares the results.
Errors errors_of(const Sequences& sequences, const Attention& attention);

// Does the same with `attention` of the whole sequences on this rank.
Errors errors_of_whole(const Sequences& sequences, const Attention& attention);

}  // namespace lockstep::internal::testing

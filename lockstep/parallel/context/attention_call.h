#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/context/context_shard.h"

// The beginning of both forms of attention over a group.
namespace lockstep::internal {

// A call of attention, as its options describe it.
struct AttentionCall {
  const char* name;  // of the function: errors begin with it
  ProcessGroupPtr group{};
  bool is_causal = false;
  std::optional<double> scale{};
  ContextOrder order = ContextOrder::plain;
  std::optional<std::chrono::milliseconds> timeout{};
};

// Query [batch, heads, tokens, head_dim], key and value [batch, key heads,
// tokens, head_dim].
struct AttentionInputs {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

// The number of tokens of each rank.
struct AttentionLengths {
  std::vector<int64_t> queries;
  std::vector<int64_t> keys;
};

// Returns the inputs in the dtype in which attention computes: under autocast
// its dtype, as for at::scaled_dot_product_attention.
AttentionInputs autocast_inputs(const AttentionInputs& inputs);

// Throws std::invalid_argument, on this rank alone, unless shapes and dtypes
// belong together and `dropout_p` is 0.
void check_attention(const AttentionCall& call, const AttentionInputs& inputs,
                     double dropout_p);

// Tells all ranks each other's lengths. Collective: one all_gather of some
// numbers. Throws std::invalid_argument, on every rank, if the ranks disagree
// about anything else: a backward pass that only some ranks make would hang.
// With a causal mask the lengths of keys must be those of the queries.
AttentionLengths agree_on_attention(const AttentionCall& call,
                                    const AttentionInputs& inputs);

}  // namespace lockstep::internal

#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <optional>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/context/context_shard.h"

namespace lockstep {

// Attention of whole sequences, for some of the heads: query [batch, heads,
// tokens, head_dim], key and value [batch, key heads, tokens, head_dim];
// returns a tensor shaped as the query.
using HeadsAttention = std::function<at::Tensor(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value)>;

// All options are the same on all ranks.
struct UlyssesAttentionOptions {
  // The following are those of RingAttentionOptions. `order` says in which
  // order the attention gets the tokens back, so it matters without is_causal,
  // too.
  ProcessGroupPtr group{};
  bool is_causal{false};
  std::optional<double> scale{};
  ContextOrder order{ContextOrder::plain};
  double dropout_p{0};

  // The function that computes the attention, on each rank alone: with masks,
  // biases or dropout, for example. Tokens are in the order of the sequence;
  // rank r of p has the r-th of p equal parts of the heads. is_causal and scale
  // must then be left alone. None means
  // at::scaled_dot_product_attention.
  HeadsAttention attention{};

  // How long a wait for another rank may take; more than 0. None means the
  // group's timeout.
  std::optional<std::chrono::milliseconds> timeout{};
};

// Does what ring_attention() does by another way: the ranks exchange parts of
// sequences for parts of heads, each computes some heads of whole sequences,
// and they exchange back. With autograd. It follows Jacobs et al., "DeepSpeed
// Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
// Transformer Models" (2023).
//
// Inputs are as for ring_attention(), but on any device for which the group has
// a backend. The numbers of heads and of key heads must be multiples of the
// number of ranks. In zigzag order the numbers of tokens must be those of
// context_shard().
//
// A rank sends (p - 1) / p of its own part of query, key, value and output in
// forward, and as much in backward, all of it before or after the computation.
// With as many key heads as heads ring attention sends p / 2 times as much in
// forward. A rank has 1 / p of the heads of whole sequences in memory.
//
// Collective: all ranks call it in the same order. One all_gather of some
// numbers, two all_to_all_single; if an input requires grad, which must be so
// on all ranks or on none, two more in backward, which each rank must make. In
// a group of one nothing is communicated.
//
// Throws std::invalid_argument as ring_attention() does, and if the heads
// cannot be divided between the ranks.
at::Tensor ulysses_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value,
                             const UlyssesAttentionOptions& options = {});

}  // namespace lockstep

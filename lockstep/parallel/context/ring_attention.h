#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/context/context_shard.h"

namespace lockstep {

// All options are the same on all ranks.
struct RingAttentionOptions {
  // The ranks that have the parts of the sequences. Null means the default
  // group.
  ProcessGroupPtr group{};

  // Whether a token attends only to itself and to the tokens before it in the
  // whole sequence.
  bool is_causal{false};

  // The factor of the products of queries and keys; above 0. None means 1 /
  // sqrt(head_dim).
  std::optional<double> scale{};

  // Which tokens each rank has. It matters only with is_causal.
  ContextOrder order{ContextOrder::plain};

  // Must be 0: there is no dropout of attention here.
  double dropout_p{0};

  // How long a wait for another rank may take; more than 0. None means the
  // group's timeout.
  std::optional<std::chrono::milliseconds> timeout{};
};

// Returns softmax(scale * query . key) . value over the keys of all ranks, for
// the queries of this rank: at::scaled_dot_product_attention of the whole
// sequences, of which each rank has a part (context_shard()). With autograd. It
// follows Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers
// for Near-Infinite Context" (ICLR 2024).
//
//   query       [batch, heads, tokens of this rank, head_dim]
//   key, value  [batch, key heads, tokens of this rank, head_dim]; the number
//               of heads is a multiple of the number of key heads
//               (grouped-query attention: consecutive heads share a key head)
//
// All are on one device and have one dtype: float64, float32, bfloat16 or
// float16 (under Autocast that of autocast). Ranks may have different numbers
// of tokens, and some none. In zigzag order with is_causal the numbers must be
// those of context_shard(). Without is_causal the keys may be those of another
// sequence (cross attention).
//
// Keys and values go from rank to rank, and travel while the rank computes with
// the ones it has. A rank has those of three ranks in memory at most, and in
// backward the gradients of three ranks, too. With p ranks each sends the keys
// and values of p - 1 ranks in forward; backward sends them again, and the
// gradients of p ranks. With a causal mask in plain order keys and values go
// only to the ranks after them. On the CPU LibTorch's flash attention computes;
// elsewhere products of matrices do, which take the memory of the queries times
// the keys of one rank, for each head.
//
// The results of blocks are summed in float32 (float64 inputs: in float64), and
// so are gradients, in an order that does not depend on timing. A half type is
// rounded once for each block, which does not add up.
//
// Collective: all ranks call it in the same order, and one all_gather of some
// numbers tells the lengths. In a group of one nothing is communicated. If an
// input requires grad, which must be so on all ranks or on none, the backward
// of the result is collective, too: each rank must make it, also a rank without
// tokens. A second derivative (create_graph) throws std::runtime_error.
//
// Throws std::invalid_argument for shapes, dtypes and options that do not fit
// (on this rank alone), and on all ranks if they disagree.
at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value,
                          const RingAttentionOptions& options = {});

}  // namespace lockstep

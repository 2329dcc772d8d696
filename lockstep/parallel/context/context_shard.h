#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>

#include "lockstep/comm/process_group.h"

// Context parallelism: each rank of a group has a part of every sequence. These
// functions cut sequences and put them together again; ring_attention.h and
// ulysses_attention.h have the attention between the parts.
namespace lockstep {

// Which tokens of a sequence of n tokens each of p ranks has. The sequence is
// cut into c chunks of consecutive tokens: n / c tokens each, and one more in
// the first n % c chunks (as torch.tensor_split). Chunks of a short sequence
// may be empty.
enum class ContextOrder {
  // c = p, and rank r has chunk r. With a causal mask the last rank computes
  // most: its tokens attend to all before them.
  plain,
  // c = 2 p, and rank r has chunk r followed by chunk 2 p - 1 - r. With a
  // causal mask all ranks compute equally much. This is the order of Python's
  // context_parallel.
  zigzag,
};

// All options are the same on all ranks.
struct ContextShardOptions {
  // The ranks that have the parts. Null means the default group.
  ProcessGroupPtr group{};

  // Which tokens a rank has. zigzag balances the work of causal attention.
  ContextOrder order{ContextOrder::plain};

  // How long each collective of context_unshard() may take; more than 0. None
  // means the group's timeout.
  std::optional<std::chrono::milliseconds> timeout{};
};

// Returns this rank's part of `whole`, whose dimension `dim` is the sequence
// (a negative one counts from the last). The part is contiguous and has memory
// of its own; it may be empty. Nothing is communicated. The gradient of `whole`
// is zero where other ranks have the tokens.
//
// Cut what has one value for each token in the same way: token numbers, targets
// (shift them against the inputs before they are cut), masks of padding.
//
// Throws std::invalid_argument if there is no such dimension.
at::Tensor context_shard(const at::Tensor& whole, int64_t dim,
                         const ContextShardOptions& options = {});

// Returns the whole sequence on every rank: the inverse of context_shard().
// Collective: one all_gather of the lengths, one of the parts, which have equal
// sizes but in dimension `dim`. In plain order a part may have any length. The
// result has no gradient.
//
// Throws std::invalid_argument if there is no such dimension, and, on all
// ranks, if the lengths are not those of the zigzag order.
at::Tensor context_unshard(const at::Tensor& part, int64_t dim,
                           const ContextShardOptions& options = {});

// Returns the places in the whole sequence, from 0, of this rank's tokens: an
// int64 tensor [tokens of this rank] on the CPU, for a sequence of
// `sequence_length` tokens. For position embeddings. Nothing is communicated.
//
// Throws std::invalid_argument if `sequence_length` is negative.
at::Tensor context_positions(int64_t sequence_length,
                             const ContextShardOptions& options = {});

}  // namespace lockstep

#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/parallel/context/context_shard.h"
#include "lockstep/state/box.h"

// Which tokens each rank has: the arithmetic of ContextOrder.
namespace lockstep::internal {

// Returns the chunks of rank `rank` of `ranks`, in the order in which the rank
// has them: one in plain order, two in zigzag order. Ranges of tokens.
std::vector<Range> context_chunks(ContextOrder order, int64_t sequence_length,
                                  int ranks, int rank);

// Returns the number of tokens in context_chunks().
int64_t context_tokens(ContextOrder order, int64_t sequence_length, int ranks,
                       int rank);

// Throws std::invalid_argument that begins with `name` unless `lengths`, the
// number of tokens of each rank, are possible: in zigzag order those of
// context_tokens() for their sum.
void require_context_lengths(const char* name, ContextOrder order,
                             const std::vector<int64_t>& lengths);

// Returns `parts`, one for each rank, as one tensor in the order of the
// sequence, which is dimension `dim`. require_context_lengths() has passed.
at::Tensor join_context(const std::vector<at::Tensor>& parts, int64_t dim,
                        ContextOrder order);

// Returns the part of `whole` that rank `rank` of `ranks` has, whose memory may
// be that of `whole`. `lengths` are as for join_context().
at::Tensor part_of_context(const at::Tensor& whole, int64_t dim,
                           ContextOrder order,
                           const std::vector<int64_t>& lengths, int rank);

}  // namespace lockstep::internal

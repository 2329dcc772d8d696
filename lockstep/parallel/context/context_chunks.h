#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/parallel/context/attention_block.h"
#include "lockstep/parallel/context/attention_call.h"
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

// Which rank computes what with which keys in ring attention. The keys of each
// rank, its block, are passed on from rank to rank, rank + 1 after rank, until
// every rank that attends to them has had them. All ranks make the same plan.
class RingPlan {
 public:
  // `lengths` are of all ranks; in zigzag order with a causal mask they are
  // those of context_tokens().
  RingPlan(AttentionLengths lengths, ContextOrder order, bool is_causal);

  // Returns which queries of rank `rank` attend to which keys of rank `source`;
  // none if all are masked, or there are none.
  std::optional<AttentionBlock> block(int rank, int source) const;

  // Returns how often the block of `source` is passed on: 0 if no other rank
  // needs it, at most ranks() - 1.
  int hops(int source) const { return hops_[static_cast<size_t>(source)]; }

  // The number of keys of rank `source`.
  int64_t keys(int source) const {
    return lengths_.keys[static_cast<size_t>(source)];
  }

  int ranks() const { return static_cast<int>(lengths_.keys.size()); }

 private:
  AttentionLengths lengths_;
  ContextOrder order_;
  bool is_causal_;
  std::vector<int64_t> first_chunks_;  // zigzag: of each rank, its length
  std::vector<int> hops_;
};

}  // namespace lockstep::internal

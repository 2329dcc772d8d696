#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/parallel/context/attention_block.h"
#include "lockstep/parallel/context/attention_call.h"

namespace lockstep::internal {

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

#include "lockstep/parallel/context/ring_plan.h"

#include <numeric>
#include <utility>

#include "lockstep/parallel/context/context_chunks.h"

namespace lockstep::internal {

RingPlan::RingPlan(AttentionLengths lengths, ContextOrder order, bool is_causal)
    : lengths_(std::move(lengths)), order_(order), is_causal_(is_causal) {
  const auto whole =
      std::accumulate(lengths_.keys.begin(), lengths_.keys.end(), int64_t{0});
  for (int rank = 0; rank < ranks(); ++rank) {
    first_chunks_.push_back(
        context_chunks(order, whole, ranks(), rank)[0].size());
  }
  for (int source = 0; source < ranks(); ++source) {
    int hops = ranks() - 1;
    while (hops > 0 && !block((source + hops) % ranks(), source)) --hops;
    hops_.push_back(hops);
  }
}

std::optional<AttentionBlock> RingPlan::block(int rank, int source) const {
  Range queries{0, lengths_.queries[static_cast<size_t>(rank)]};
  Range keys{0, this->keys(source)};
  if (queries.size() == 0) return std::nullopt;  // also of an empty batch
  if (is_causal_ && rank != source) {
    const bool later = source > rank;
    if (order_ == ContextOrder::plain) {
      if (later) return std::nullopt;
    } else if (later) {
      // The first chunk of `rank` is before both chunks of `source`, its second
      // chunk after both.
      queries.begin = first_chunks_[static_cast<size_t>(rank)];
    } else {
      // Both chunks of `rank` are after the first chunk of `source`, and before
      // its second.
      keys.end = first_chunks_[static_cast<size_t>(source)];
    }
  }
  if (queries.size() == 0 || keys.size() == 0) return std::nullopt;
  // A rank's own tokens ascend in either order, so the mask between its own
  // keys and queries is the ordinary one.
  return AttentionBlock{queries, keys, is_causal_ && rank == source};
}

}  // namespace lockstep::internal

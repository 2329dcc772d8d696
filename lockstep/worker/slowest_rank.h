#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::internal {

// One rank, and which share of its time it was in operations: 0 to 1.
struct RankShare {
  double comm_share;
  int rank;
};

// Returns the rank for which the others wait: in operations it is for a share
// of its time that is at least a tenth smaller than that of each other rank.
// Returns nothing if there is no such rank.
inline std::optional<int> slowest_rank(std::vector<RankShare> ranks) {
  constexpr double kSmaller = 0.1;
  if (ranks.size() < 2) return std::nullopt;
  std::ranges::partial_sort(ranks, ranks.begin() + 2, {},
                            &RankShare::comm_share);
  if (ranks[1].comm_share - ranks[0].comm_share < kSmaller) return std::nullopt;
  return ranks[0].rank;
}

}  // namespace lockstep::internal

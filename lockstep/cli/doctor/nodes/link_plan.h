#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace lockstep::internal {

// Which links of a job are measured, and in which order.
//
// Up to this number of nodes every link is measured; beyond it each node with
// the next one, in a ring, so that the time does not grow with the nodes.
inline constexpr int kMostNodesOfAllLinks = 8;

// Returns the partner of each of `nodes` nodes, by their places, in each step;
// nothing for a node that pauses. A node has one partner at a time, as two
// links of one host would share its network card. All links are the tournament
// of the circle method: nodes - 1 steps, or one more for an odd number. A ring
// is 2 steps, or 3.
using LinkStep = std::vector<std::optional<int>>;
std::vector<LinkStep> link_plan(int nodes);

// Returns the links of the plan, the lower place first, in ascending order.
std::vector<std::pair<int, int>> links_of(const std::vector<LinkStep>& plan);

}  // namespace lockstep::internal

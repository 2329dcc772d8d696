#include "lockstep/cli/doctor/nodes/link_plan.h"

#include <algorithm>

namespace lockstep::internal {
namespace {

void pair_up(LinkStep& step, int one, int other) {
  step[static_cast<size_t>(one)] = other;
  step[static_cast<size_t>(other)] = one;
}

// One node stays in its seat and the others move on by one seat in each step;
// the node that sits opposite is the partner. An odd number gets an empty seat.
std::vector<LinkStep> all_links(int nodes) {
  const int seats = nodes + nodes % 2;
  std::vector<LinkStep> plan;
  for (int turn = 0; turn + 1 < seats; ++turn) {
    LinkStep step(static_cast<size_t>(nodes));
    const auto sits_at = [&](int seat) {
      return seat == 0 ? 0 : 1 + (seat - 1 + turn) % (seats - 1);
    };
    for (int seat = 0; seat < seats / 2; ++seat) {
      const int one = sits_at(seat);
      const int other = sits_at(seats - 1 - seat);
      if (one < nodes && other < nodes) pair_up(step, one, other);
    }
    plan.push_back(std::move(step));
  }
  return plan;
}

std::vector<LinkStep> ring(int nodes) {
  std::vector<LinkStep> plan(static_cast<size_t>(2 + nodes % 2),
                             LinkStep(static_cast<size_t>(nodes)));
  for (int node = 0; node < nodes; ++node) {
    // In an odd ring the last link touches links of both other steps.
    const bool closes = nodes % 2 == 1 && node + 1 == nodes;
    const auto step = static_cast<size_t>(closes ? 2 : node % 2);
    pair_up(plan[step], node, (node + 1) % nodes);
  }
  return plan;
}

}  // namespace

std::vector<LinkStep> link_plan(int nodes) {
  if (nodes < 2) return {};
  return nodes <= kMostNodesOfAllLinks ? all_links(nodes) : ring(nodes);
}

std::vector<std::pair<int, int>> links_of(const std::vector<LinkStep>& plan) {
  std::vector<std::pair<int, int>> links;
  for (const auto& step : plan) {
    for (int node = 0; node < std::ssize(step); ++node) {
      const auto partner = step[static_cast<size_t>(node)];
      if (partner && node < *partner) links.emplace_back(node, *partner);
    }
  }
  std::ranges::sort(links);
  return links;
}

}  // namespace lockstep::internal

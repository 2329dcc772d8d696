#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"

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

// The figures that one node has measured on the way to another one.
struct LinkFigures {
  std::string error{};  // not empty: it was not reached, and why
  int64_t connect_us = 0;
  int64_t round_trip_us = 0;  // of one byte and its answer, the median
  // The difference that must be added to a time of this host to get that of the
  // other, and the most by which this may be wrong.
  int64_t clock_offset_us = 0;
  int64_t clock_error_us = 0;
  // The throughput of one connection towards the other node. 0 if nothing came
  // through, though single bytes do.
  int64_t bytes_per_second = 0;
  // The largest packet that this host sends on this way; nothing if the kernel
  // does not say.
  std::optional<int64_t> mtu{};

  nlohmann::ordered_json json() const;
  // Parses what another node has written. Throws std::runtime_error if it is
  // no such document.
  static LinkFigures parse(const std::string& text);
};

// Connects to the LinkListener at `endpoint` that has `token`, as node `rank`,
// and measures the way: about 0.8 s. The listener answers when it is this
// link's turn there. Blocks until `deadline` at most, and for at most
// kMostConnectTime to connect to each address; what fails is the `error`.
LinkFigures measure_link(const Endpoint& endpoint, const std::string& token,
                         int rank, const Deadline& deadline);
inline constexpr std::chrono::milliseconds kMostConnectTime{3000};

}  // namespace lockstep::internal

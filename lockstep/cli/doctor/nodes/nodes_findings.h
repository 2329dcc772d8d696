#pragma once

#include <map>
#include <utility>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/nodes/link_probe.h"
#include "lockstep/cli/doctor/nodes/node_record.h"

namespace lockstep::internal {

// The records of the doctors of all nodes.
struct NodesFound {
  int nodes = 0;  // that were asked for; those without a record are absent
  std::map<int, NodeRecord> records{};
  // The links that were to be measured, the lower rank first.
  std::vector<std::pair<int, int>> links{};
  // The key is the rank from which and that to which a way leads. A way is
  // missing if its node has not told in time.
  std::map<std::pair<int, int>, LinkFigures> ways{};
};

// Returns a finding for each node, for each link that is broken or slow, and
// for all other links together. What is usual is what the best quarter of the
// ways reaches, as one bad host spoils all of its links.
std::vector<Finding> nodes_findings(const NodesFound& found);

// Returns the verdict on `findings`, which node `rank` shows: a finding "nodes"
// that names those that are not well.
Finding nodes_verdict(const NodesFound& found,
                      const std::vector<Finding>& findings);

}  // namespace lockstep::internal

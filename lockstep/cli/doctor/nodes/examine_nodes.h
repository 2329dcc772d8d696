#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/launch/nodes/job_member.h"

namespace lockstep::internal {

// Meets the doctors of the other nodes at the agents' store, measures the links
// to them, and returns the verdict on all nodes and links, the finding "nodes",
// which all nodes return alike. On the first node of those that have come it
// comes after the findings of each node and of the links (nodes_findings.h).
//
// `meeting` says where the nodes meet, how many they are, and for how long this
// one waits for the store and after that for the others (join_timeout). `own`:
// what was found on this host. `say` gets lines for the user while it waits.
//
// Blocks for those two times at most, 20 s for each step of link_plan(), and
// 40 s more. Throws std::invalid_argument if this node cannot take part,
// AgentStoreError if the store is lost, each with one line.
std::vector<Finding> examine_nodes(
    const JobMemberOptions& meeting, const std::vector<Finding>& own,
    const std::function<void(const std::string&)>& say);

}  // namespace lockstep::internal

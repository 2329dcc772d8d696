#pragma once

#include <memory>
#include <string>

#include "lockstep/launch/nodes/store_line.h"

namespace lockstep::internal {

// The place of a node's workers among those of all nodes. Global ranks go by
// node rank, then by local rank; so do role ranks, among the nodes of one role.
struct NodePlace {
  // Returns the place of the only node, which has `workers` workers.
  static NodePlace alone(int workers) {
    NodePlace place;
    place.world_size = workers;
    place.role_world_size = workers;
    return place;
  }

  int node_rank = 0;
  int nnodes = 1;
  int first_rank = 0;
  int world_size = 1;
  int first_role_rank = 0;
  int role_world_size = 1;
};

// The plan by which a node starts one attempt. If there are several nodes, they
// agree on it in the rendezvous round of the same number.
struct RoundPlan {
  int round = 0;  // number of the attempt
  int restarts_used = 0;
  NodePlace place{};
  std::string master_addr = "127.0.0.1";  // where rank 0 opens its store
  int master_port = 0;
  // To the agents' store, for the calls of this node's workers. Null if there
  // is one node, the agents' store is not ours, or the workers are Python's.
  std::shared_ptr<StoreLine> line{};
};

}  // namespace lockstep::internal

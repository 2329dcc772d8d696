#pragma once

#include <string>

namespace lockstep {

// Where a node's workers stand among those of all nodes: global ranks go by
// node rank, then by local rank; role ranks likewise, among the nodes of one
// role.
struct NodePlace {
  // The only node, of so many workers.
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

// What a node needs to start one round: the start, or a restart.
struct RoundPlan {
  int round = 0;  // restarts used
  NodePlace place{};
  std::string master_addr = "127.0.0.1";  // where rank 0 opens its store
  int master_port = 0;
};

}  // namespace lockstep

#pragma once

#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/shm/protocol/handshake.h"

namespace lockstep::internal::hybrid {

// Which ranks of a group share memory. The same on all ranks except `host` and
// `local`, which are this rank's place.
struct Topology {
  // Ranks of the group in rising order; hosts in the order of their first
  // ranks.
  std::vector<std::vector<int>> hosts;
  int host;
  int local;  // position in hosts[host]

  // The number of lanes between the hosts. Lane i connects the i-th ranks of
  // all hosts, so there are as many as the smallest host has ranks.
  int lanes() const;
};

struct Neighbours {
  Topology topology;
  // The memory shared with the ranks of this host; none if this rank is alone.
  std::optional<shm::Membership> membership;
};

// Ranks share a host if their host_identity() is the same and the handshake of
// shared memory between all of them succeeds. LOCKSTEP_HOST_ID, if set,
// replaces the identity: ranks that set different ones do not share memory (to
// try several hosts on one).
//
// Keys in request.store: "host/R", the host that rank R names; "shares/R", the
// first of the ranks with which rank R shares memory; and those of shm::meet()
// after "of/F/", where F is the first of the candidates.
Neighbours find_neighbours(const BackendRequest& request,
                           const Deadline& deadline);

}  // namespace lockstep::internal::hybrid

#pragma once

#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/shm/protocol/handshake.h"

namespace lockstep::hybrid {

// Which ranks of a group share memory. The same on all ranks but for `host`
// and `local`, this rank's place.
struct Topology {
  // Ranks of the group in rising order; hosts in the order of their first.
  std::vector<std::vector<int>> hosts;
  int host;
  int local;  // position in hosts[host]

  // Ways between the hosts: rank i of a host and the i-th of the others, for as
  // many as every host has.
  int lanes() const;
};

struct Neighbours {
  Topology topology;
  // With those of this rank's host; none if it is alone there.
  std::optional<shm::Membership> membership;
};

// Ranks share a host if their host_identity() is the same and the handshake of
// shared memory between all of them succeeds. LOCKSTEP_HOST_ID, where set,
// stands for the identity: ranks that set different ones do not share memory
// (to try several hosts on one).
//
// Keys, behind request.store: host/R, what rank R says of its host; shares/R,
// the first of those it shares with; and those of shm::meet() behind "of/F/",
// where F is the first of the candidates.
Neighbours find_neighbours(const BackendRequest& request,
                           const Deadline& deadline);

}  // namespace lockstep::hybrid

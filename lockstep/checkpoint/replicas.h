#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/checkpoint/ranks.h"

namespace lockstep::internal {

// The checksums of what this rank has and other ranks may have, too, which must
// then be equal: by set, then by the tensor's name. A rank has most sets as a
// whole or not at all, so one number stands for a set in the first comparison.
using ReplicaChecksums =
    std::map<std::string, std::map<std::string, std::string>>;

// Returns these numbers, for require_equal_replicas() on all ranks.
nlohmann::json digests_of(const ReplicaChecksums& checksums);

// Throws std::invalid_argument, on every rank, if ranks have different values
// of a tensor; it names the tensor and the ranks. `digests`: the digests_of()
// all ranks, in rank order; only if those of a set differ do the ranks tell
// each other its checksums. Collective.
void require_equal_replicas(const std::vector<nlohmann::json>& digests,
                            const ReplicaChecksums& mine, const Ranks& ranks);

}  // namespace lockstep::internal

#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/checkpoint/ranks.h"

namespace lockstep::internal {

// Throws the error of a rank that has not failed itself. `words` are the ranks
// that have and the words of the first: "rank 1: ...". `is_mistake`: whether
// that rank has thrown std::invalid_argument.
using ThrowForOthers =
    std::function<void(const std::string& words, bool is_mistake)>;

// Throws that `path` "was not saved", or "cannot be saved":
// std::invalid_argument for a mistake, else SnapshotError.
ThrowForOthers failed_save(const std::string& path,
                           const std::string& outcome = "was not saved");

// Throws SnapshotError: `path` was loaded by no rank.
ThrowForOthers failed_load(const std::string& path);

// Collective. `collect` fills in the object that this rank tells the others.
// Returns what all have told, by rank. If `collect` has thrown on a rank, every
// rank throws: that rank its own exception, the others `throw_for_others`.
//
// Snapshots compare what this returns, and do not make an Agreement, because
// their ranks may be one process without a group, or exchange texts beside
// training (Ranks::through_store()), and because their errors name all ranks
// that differ.
std::vector<nlohmann::json> gather_or_fail(
    const Ranks& ranks, const std::function<void(nlohmann::json&)>& collect,
    const ThrowForOthers& throw_for_others);

// Collective. Returns on all ranks what `work` returns on rank 0, where alone
// it is called. If it throws, every rank throws, as with gather_or_fail().
std::string from_first_rank(const Ranks& ranks,
                            const std::function<std::string()>& work,
                            const ThrowForOthers& throw_for_others);

}  // namespace lockstep::internal

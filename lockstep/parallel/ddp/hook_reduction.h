#pragma once

#include <memory>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/comm_hook.h"

namespace lockstep {

// Reduction by a communication hook, which also divides; results are
// everywhere. `buckets` and `parameters` must outlive it.
//
// After abandon() the next reclaim() is a collective of the group, so that
// hooks of two rounds do not meet: a rank that has not given up, and waits in a
// collective of its hook, gets a c10::DistBackendError (at its deadline where
// the group's backend does not compare calls) and is to give up, too.
//
// Blocking: finish() and reclaim() wait for the hook's futures, begin() and
// publish() for what the hook itself waits; after abandon() reclaim() also
// waits for all ranks, at most for the group's timeout once for each bucket and
// once more. Collectives that a hook starts have the deadline of their group
// and name who did not come; a future that stays away for kChained such
// deadlines is a c10::DistBackendError with its bucket. Errors: what the hook
// throws or its future failed with; std::invalid_argument for a future of
// something else than the bucket's elements.
inline constexpr int kChained = 4;
std::unique_ptr<BucketReduction> hook_buckets(
    const std::vector<Bucket>& buckets,
    const std::vector<NamedParameter>& parameters, CommHook hook,
    ProcessGroupPtr group);

}  // namespace lockstep

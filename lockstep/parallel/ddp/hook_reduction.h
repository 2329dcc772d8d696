#pragma once

#include <memory>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/comm_hook.h"

namespace lockstep::internal {

// Makes a reduction by a communication hook, which also divides; every rank
// gets all results. `buckets` and `parameters` must outlive it. Collective.
//
// Iterations are compared as make_iteration_check() says: on one host when
// finish() is called, after the hooks have run and before their results are
// used.
//
// After abandon() the next reclaim() is a collective of the group, so that
// hooks of two iterations do not mix. A rank that has not given up, but waits
// in a collective of its hook, gets a c10::DistBackendError (at its deadline if
// the group's backend does not compare calls) and must give up, too.
//
// Blocking: finish() and reclaim() wait for the hook's futures, begin() and
// publish() as long as the hook itself waits. After abandon() reclaim() also
// waits for all ranks, at most once for each bucket and once more, each time
// for the group's timeout. Collectives that a hook starts have their group's
// deadline and name the ranks that did not come; a future that does not
// complete for kChained such deadlines is a c10::DistBackendError with its
// bucket. Errors: what the hook throws or its future failed with;
// std::invalid_argument for a future whose value is not the bucket's elements.
inline constexpr int kChained = 4;
std::unique_ptr<BucketReduction> hook_buckets(
    const std::vector<GradientBucket>& buckets,
    const std::vector<NamedParameter>& parameters, CommHook hook,
    ProcessGroupPtr group);

}  // namespace lockstep::internal

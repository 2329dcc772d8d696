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
// Blocking: finish() and reclaim() wait for the hook's futures, begin() and
// publish() for what the hook itself waits. Collectives that a hook starts have
// the deadline of their group and name who did not come; a future that stays
// away for kChained such deadlines is a c10::DistBackendError with its bucket.
// Errors: what the hook throws or its future failed with; std::invalid_argument
// for a future of something else than the bucket's elements.
inline constexpr int kChained = 4;
std::unique_ptr<BucketReduction> hook_buckets(
    const std::vector<Bucket>& buckets,
    const std::vector<NamedParameter>& parameters, CommHook hook,
    ProcessGroupPtr group);

}  // namespace lockstep

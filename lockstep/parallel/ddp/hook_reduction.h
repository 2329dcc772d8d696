#pragma once

#include <memory>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/comm_hook.h"

namespace lockstep {

// Reduction by a communication hook, which also divides; results are
// everywhere. `buckets` and `parameters` must outlive it.
std::unique_ptr<BucketReduction> hook_buckets(
    const std::vector<Bucket>& buckets,
    const std::vector<NamedParameter>& parameters, CommHook hook);

}  // namespace lockstep

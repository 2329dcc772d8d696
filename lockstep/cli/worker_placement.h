#pragma once

#include "lockstep/cli/run_arguments.h"
#include "lockstep/launch/agent/worker_group.h"

namespace lockstep::internal {

// Sets which CPUs, how many threads and which GPU each worker gets, by
// --numa-binding, --omp-threads and --virtual-local-rank. Requires the number
// of workers. Throws std::invalid_argument of one line.
void place_workers(const RunArguments& arguments, WorkerGroupOptions& workers);

}  // namespace lockstep::internal

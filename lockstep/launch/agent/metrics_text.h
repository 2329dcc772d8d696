#pragma once

#include <string>

#include "lockstep/launch/watch/job_status.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

// Returns what is known of a job and its ranks in the text format of
// Prometheus (Prometheus documentation, "Exposition formats", version 0.0.4).
// Counters of a rank begin again at 0 when it is started again, as Prometheus
// expects of a counter. What a rank has not published is left out.
std::string metrics_text(const JobStatus& job, const StatusBoard& board);

}  // namespace lockstep::internal

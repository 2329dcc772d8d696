#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/cli/report/clock_alignment.h"
#include "lockstep/cli/report/operator_times.h"
#include "lockstep/cli/report/step_time.h"
#include "lockstep/cli/report/straggler.h"
#include "lockstep/cli/report/trace_folder.h"

// The contents of `lockstep report trace` for a run; docs/trace-report.md
// defines the words.
namespace lockstep::internal {

struct RankReport {
  int rank = 0;
  std::string host{};  // empty if it is not known
  size_t steps = 0;
  int64_t step_ns = 0;  // mean
  int64_t median_step_ns = 0;
  StepTime time{};   // of all steps together
  double flops = 0;  // of all steps together
};

struct TraceReport {
  std::string folder{};
  int world_size = 1;
  std::vector<RankReport> ranks{};
  std::vector<int> missing{};
  bool whole_traces = false;  // there are no steps; each trace counts as one
  ClockAlignment clocks{};
  Balance balance{};
  std::vector<OperatorTime> operators{};  // of all ranks, the longest first
  size_t uncounted_convolutions = 0;      // that flops_per_second() leaves out
  std::vector<std::string> warnings{};    // those of the clocks, too

  // The part of the ranks' time in which they computed, from 0 to 1.
  double goodput() const;
  // All ranks together; 0 if the traces tell no operations.
  double flops_per_second() const;
};

TraceReport make_trace_report(const TraceFolder& folder);

// Returns a table for people and some lines after it, without the warnings.
std::string trace_table(const TraceReport& report);

// Returns JSON for programs; docs/trace-report.md has the fields.
std::string trace_json(const TraceReport& report);

}  // namespace lockstep::internal

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/cli/report/step_time.h"
#include "lockstep/cli/report/trace_events.h"
#include "lockstep/cli/report/trace_file.h"
#include "lockstep/cli/report/trace_folder.h"

namespace lockstep::internal {

// How far the times of different ranks can be compared.
struct ClockAlignment {
  // Each file has a measured offset, which read_trace_file() has applied.
  bool measured = false;
  int64_t uncertainty_ns = 0;  // the largest of the files
  // One sentence for each reason to doubt the times.
  std::vector<std::string> warnings{};
};

// `files` must be sorted by rank, with the steps of the ranks' programs.
ClockAlignment compare_clocks(const std::vector<TraceFile>& files);

// The time of an operator or kernel by itself: without the events inside it.
struct OperatorTime {
  std::string name{};
  int64_t calls = 0;
  int64_t self_ns = 0;
};

// Adds to `times`, by name, the operators of a file that begin in its steps. If
// the file has events of a GPU, only kernels and copies count.
void add_operator_times(const TraceFile& file,
                        std::map<std::string, OperatorTime>& times);

// Returns them, the longest first.
std::vector<OperatorTime> by_time(std::map<std::string, OperatorTime> times);

// The contents of `lockstep report trace` for a run; docs/trace-report.md
// defines the words.

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

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/cli/report/trace_file.h"

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

}  // namespace lockstep::internal

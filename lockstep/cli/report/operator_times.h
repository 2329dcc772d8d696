#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/cli/report/interval.h"
#include "lockstep/cli/report/trace_file.h"

namespace lockstep::internal {

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

}  // namespace lockstep::internal

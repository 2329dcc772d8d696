#include "lockstep/cli/report/clock_alignment.h"

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/cli/inspect/flight_comparison.h"

namespace lockstep::internal {
namespace {

struct RankStep {
  int rank;
  Interval time;
};

// The ranks of a job make a step at nearly the same time, because they wait for
// each other in it. If two ranks did not, their clocks differ. The last step of
// a trace does not count, because it may end before the rank has waited.
void find_steps_apart(const std::vector<TraceFile>& files,
                      ClockAlignment& clocks) {
  std::map<int64_t, RankStep> earliest;  // by number: the one that ends first
  std::map<int64_t, RankStep> latest;    // the one that begins last
  for (const TraceFile& file : files) {
    for (const auto& [number, time] : file.steps) {
      if (file.steps.size() > 1 && number == file.steps.rbegin()->first) {
        continue;
      }
      const RankStep step{file.header.rank, time};
      auto& early = earliest.emplace(number, step).first->second;
      if (time.end < early.time.end) early = step;
      auto& late = latest.emplace(number, step).first->second;
      if (time.begin > late.time.begin) late = step;
    }
  }
  for (const auto& [number, early] : earliest) {
    const RankStep& late = latest.at(number);
    if (number < 0 || late.rank == early.rank ||
        late.time.begin < early.time.end) {
      continue;
    }
    clocks.warnings.push_back(
        "step " + std::to_string(number) + " of rank " +
        std::to_string(late.rank) + " begins " +
        duration(late.time.begin - early.time.end) + " after that of rank " +
        std::to_string(early.rank) +
        " has ended: the clocks differ, and times of different ranks cannot be "
        "compared");
    return;  // one step says it all
  }
}

}  // namespace

ClockAlignment compare_clocks(const std::vector<TraceFile>& files) {
  ClockAlignment clocks;
  std::set<std::string> hosts;
  std::set<int> unmeasured;
  for (const TraceFile& file : files) {
    if (!file.header.host.empty()) hosts.insert(file.header.host);
    // A profiler that compares no clocks writes zeros. All others' clocks are
    // compared with that of rank 0.
    const TraceHeader& header = file.header;
    const bool compared =
        header.clock_offset_ns != 0 || header.clock_uncertainty_ns != 0;
    if (!header.clock_measured || (header.rank != 0 && !compared)) {
      unmeasured.insert(header.rank);
    }
    clocks.uncertainty_ns =
        std::max(clocks.uncertainty_ns, file.header.clock_uncertainty_ns);
  }
  clocks.measured = unmeasured.empty();
  if (!clocks.measured && hosts.size() > 1) {
    clocks.warnings.push_back(
        "the clock of " + rank_list({unmeasured.begin(), unmeasured.end()}) +
        " was not compared with the others' (no lockstep.clock_offset_ns)");
  }
  find_steps_apart(files, clocks);
  return clocks;
}

}  // namespace lockstep::internal

#pragma once

#include <string>
#include <vector>

#include "lockstep/cli/bench/options.h"
#include "lockstep/cli/bench/world.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::internal::bench {

// One side that is measured: ours, or a peer that does the same work. Its
// program understands the lines of docs/benchmarks.md ("Your own peer").
struct Side {
  std::string name;  // the JSON's "side" and the table's column
  Program program;
  Launch launch;
};

// Returns our side, then the peers that were asked for. A peer that is not
// available here is left out, and `left_out` gets one line that says why.
// Throws std::invalid_argument (or ProgramError, which is one) that names what
// is missing and what to do.
std::vector<Side> sides(const Options& options,
                        std::vector<std::string>& left_out);

// Processes that compute and never wait: they compete with the ranks for the
// cores, as the programs of other users do. The kernel kills them when this
// process dies.
class Competitors {
 public:
  // Starts `count` processes. This process must have one thread. Throws
  // std::system_error.
  explicit Competitors(int count);
  Competitors(const Competitors&) = delete;
  // Kills and reaps them.
  ~Competitors();

 private:
  std::vector<ChildProcess> processes_{};
};

}  // namespace lockstep::internal::bench

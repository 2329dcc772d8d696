#pragma once

#include <string>
#include <vector>

#include "lockstep/cli/bench/options.h"
#include "lockstep/cli/bench/world.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::internal::bench {

// One side that is measured: ours, or a peer that does the same work. A further
// peer needs one more entry in sides(), and a program that understands the
// lines of docs/internals/benchmarks.md ("Adding a peer").
struct Side {
  std::string name;  // the JSON's "side" and the table's column
  Program program;
  Launch launch;
  bool only_all_reduce;  // and only synchronously
};

// Returns our side, then the peers that were asked for. A peer that is not
// available here is left out, and `left_out` gets one line that says why.
// Throws std::invalid_argument (or ProgramError, which is one) that names what
// is missing and what to do.
std::vector<Side> sides(const Options& options,
                        std::vector<std::string>& left_out);

// Returns the side that uses shm::Group without LibTorch.
Side protocol_side(const Options& options);

// Returns `given` (--python), otherwise LOCKSTEP_PYTHON, otherwise
// .venv/bin/python in a folder above this program, otherwise python3 from PATH.
// Whether that Python has torch shows only when it is started.
std::string find_python(const std::string& given);

}  // namespace lockstep::internal::bench

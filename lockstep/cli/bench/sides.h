#pragma once

#include <string>
#include <vector>

#include "lockstep/cli/bench/options.h"
#include "lockstep/cli/bench/world.h"
#include "lockstep/launch/program.h"

namespace lockstep::bench {

// Who is measured: ours, or a peer that does the same work. A further peer is
// one more entry of sides(), and a program that understands the lines of
// docs/benchmarks.md ("Adding a peer").
struct Side {
  std::string name;  // the JSON's "side" and the table's column
  Program program;
  Launch launch;
  bool only_all_reduce;  // synchronous
};

// Ours first, then the peers asked for. What cannot be had here is left out,
// and `left_out` gets one line that says why. Throws std::invalid_argument (or
// ProgramError, which is one) that names what is missing and what to do.
std::vector<Side> sides(const Options& options,
                        std::vector<std::string>& left_out);

// shm::Group without LibTorch.
Side protocol_side(const Options& options);

// --python, else LOCKSTEP_PYTHON, else .venv/bin/python in a folder above this
// program, else python3 from PATH. Whether it has torch it says when started.
std::string find_python(const std::string& given);

}  // namespace lockstep::bench

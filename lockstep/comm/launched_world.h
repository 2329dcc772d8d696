#pragma once

#include <functional>
#include <string>

namespace lockstep {

// What a launcher with its own means of communication (mpirun) tells a process
// without any environment. Internal to comm.
struct LaunchedWorld {
  int rank;
  int size;
  bool one_host;
  // Gives every rank the text of rank 0, 500 characters at most; what the
  // others give is ignored. Each rank calls it once. Blocks until rank 0 has,
  // throws c10::DistBackendError when the time for that is over.
  std::function<std::string(const std::string&)> from_rank_zero;
};

}  // namespace lockstep

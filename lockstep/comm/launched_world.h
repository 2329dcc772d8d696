#pragma once

#include <functional>
#include <string>

namespace lockstep::internal {

// The world of a process, as it is described, without any environment, by a
// launcher that has its own means of communication (mpirun). Internal to comm.
struct LaunchedWorld {
  int rank;
  int size;
  bool one_host;
  // Returns rank 0's text on every rank, 500 characters at most; the texts of
  // the others are ignored. Each rank calls it once. Blocks until rank 0 has
  // called it; throws c10::DistBackendError when the time for that is over.
  std::function<std::string(const std::string&)> from_rank_zero;
};

}  // namespace lockstep::internal

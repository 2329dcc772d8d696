#pragma once

#include <string>
#include <vector>

namespace lockstep::internal {

// A worker that was found to hang (hang_finder.h).
struct HungWorker {
  int local_rank = 0;
  // For people: for how long it has made no progress, what it does, and on
  // further lines what the others do.
  std::string message{};
  // The frames of its main thread, the innermost first; empty if it did not
  // answer.
  std::vector<std::string> stack{};
  // It waits in an operation, maybe for a rank of another node.
  bool waits_for_others = false;
};

}  // namespace lockstep::internal

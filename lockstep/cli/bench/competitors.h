#pragma once

#include <vector>

#include "lockstep/launch/process/child_process.h"

namespace lockstep::internal::bench {

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

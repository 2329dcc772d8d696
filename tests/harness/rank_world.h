#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/launch/process/store_port.h"
#include "tests/harness/rank_process.h"

namespace lockstep::internal::testing {

// The processes of one world, a port that is held for their store and a folder
// that they share. The destructor kills the processes and removes the folder.
class RankWorld {
 public:
  // Starts this program again as `size` ranks with the launcher's environment
  // (RANK, MASTER_PORT, ...), OMP_NUM_THREADS=1, the folder's path in
  // LOCKSTEP_TEST_FOLDER, and `environment`, of the form "NAME=value".
  explicit RankWorld(int size,
                     const std::vector<std::string>& environment = {});
  RankWorld(const RankWorld&) = delete;
  RankWorld& operator=(const RankWorld&) = delete;
  ~RankWorld();

  std::vector<RankProcess>& ranks() { return ranks_; }

 private:
  StorePort port_;
  std::filesystem::path folder_;
  std::vector<RankProcess> ranks_;
};

}  // namespace lockstep::internal::testing

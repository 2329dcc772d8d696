#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/harness/rank_world.h"
#include "tests/parallel/fuzz/rank_run.h"

namespace lockstep::fuzz {

struct FuzzWorldOptions {
  int world_size{2};
  std::string backend{"lockstep"};
  // How long one case may take before its ranks are killed.
  std::chrono::seconds case_timeout{20};
};

// Processes of this program that run cases over one group: they start with the
// first case, and anew after one from which the group may not have recovered.
class FuzzWorld {
 public:
  explicit FuzzWorld(FuzzWorldOptions options);

  // Runs the case of `seed` after `edits` on all ranks. The reason begins with
  // the rank that says it. Blocks for the case's time at most.
  Outcome run(uint64_t seed, const std::vector<size_t>& edits);

  // False if the next run() starts the ranks first.
  bool is_running() const { return world_.has_value(); }

 private:
  const FuzzWorldOptions options_;
  std::optional<testing::RankWorld> world_;
};

// What a process does that FuzzWorld has started: runs cases until the socket
// closes.
[[noreturn]] void serve_as_rank(int socket);

}  // namespace lockstep::fuzz

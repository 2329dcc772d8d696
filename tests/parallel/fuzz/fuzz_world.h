#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/harness/rank_world.h"
#include "tests/parallel/fuzz/subject.h"

namespace lockstep::internal::fuzz {

struct FuzzWorldOptions {
  int world_size{2};
  std::string backend{"lockstep"};
  // The time of one case, after which its ranks are killed.
  std::chrono::seconds case_timeout{20};
};

// Processes of this program that run cases over one group. They start with the
// first case, and again after a case from which the group may not have
// recovered.
class FuzzWorld {
 public:
  explicit FuzzWorld(FuzzWorldOptions options);

  // Runs the case of `seed` after `edits` on all ranks. The reason begins with
  // the rank that reports it. Blocks for at most the time of a case.
  Outcome run(uint64_t seed, const Edits& edits);

  // Returns false if the next run() must start the ranks first.
  bool is_running() const { return world_.has_value(); }

 private:
  const FuzzWorldOptions options_;
  std::optional<testing::RankWorld> world_;
};

// Runs cases of `subject` in a process that FuzzWorld has started, until the
// socket closes.
[[noreturn]] void serve_as_rank(const Subject& subject, int socket);

}  // namespace lockstep::internal::fuzz

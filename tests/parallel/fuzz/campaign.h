#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/harness/rank_process.h"
#include "tests/parallel/fuzz/rank_run.h"

namespace lockstep::fuzz {

struct CampaignOptions {
  int world_size{2};
  std::string backend{"lockstep"};
  uint64_t begin{0};
  uint64_t end{200};
  // How long one case may take before its ranks are killed.
  std::chrono::seconds case_timeout{20};
  bool reduces{false};
  bool prints_statistics{false};
  // Prints the program of each failing case as it was drawn.
  bool prints_programs{false};
  // Only cases with a feature (features.h) that contains each of `with`, and
  // none that contains one of `without`.
  std::vector<std::string> with{};
  std::vector<std::string> without{};
};

// Processes of this program that run cases over one group: they start with the
// first case, and anew after one from which the group may not have recovered.
class FuzzWorld {
 public:
  explicit FuzzWorld(const CampaignOptions& options);
  ~FuzzWorld();

  // Runs the case of `seed` after `edits` on all ranks. The reason begins with
  // the rank that says it. Blocks for the case's time at most.
  Outcome run(uint64_t seed, const std::vector<size_t>& edits);

  // False where the next run() starts the ranks first.
  bool is_running() const { return !ranks_.empty(); }

 private:
  void start();
  void stop();

  const CampaignOptions options_;
  std::filesystem::path folder_;
  FileDescriptor held_port_;
  std::vector<testing::RankProcess> ranks_;
};

// Runs the cases, prints each failure and the sums; true if none failed.
bool run_campaign(const CampaignOptions& options);

// What a process does that FuzzWorld has started: runs cases until the socket
// closes.
[[noreturn]] void serve_as_rank(int socket);

}  // namespace lockstep::fuzz

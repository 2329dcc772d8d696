#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/parallel/fuzz/fuzz_world.h"

namespace lockstep::internal::fuzz {

struct CampaignOptions {
  FuzzWorldOptions world{};
  uint64_t begin{0};
  uint64_t end{200};
  bool reduces{false};
  bool prints_statistics{false};
  // Prints the program of each failing case as it was drawn.
  bool prints_programs{false};
  // Runs only cases that have, for each text of `with`, a feature that contains
  // it, and no feature that contains a text of `without`.
  std::vector<std::string> with{};
  std::vector<std::string> without{};
};

// Runs the cases, prints each failure and the totals; returns true if none
// failed.
bool run_campaign(const Subject& subject, const CampaignOptions& options);

}  // namespace lockstep::internal::fuzz

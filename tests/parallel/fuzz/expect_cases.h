#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fuzz/subject.h"

namespace lockstep::internal::fuzz {

// Runs the cases of the seeds until one fails on some rank. Collective.
// `program`: what reduces a failing one.
template <class Case>
void expect_cases_pass(const CaseKind<Case>& kind, const char* program,
                       const std::string& backend, uint64_t begin,
                       uint64_t end) {
  const auto group =
      init_process_group(backend, {.timeout = std::chrono::seconds(10)});
  at::set_num_threads(1);
  for (uint64_t seed = begin; seed < end; ++seed) {
    const auto outcome = kind.run(kind.draw(seed, group->size()));
    EXPECT_NE(outcome.verdict, Verdict::failed)
        << outcome.reason << "; " << program << " --world " << group->size()
        << " --backend " << backend << " --seeds " << seed << " --reduce";
    auto failed = torch::tensor(outcome.verdict == Verdict::failed ? 1 : 0)
                      .to(group->control_device());
    all_reduce(failed);
    if (failed.template item<int64_t>() > 0) return;
  }
}

template <class Case>
void expect_features_in_one_of_eighty(const CaseKind<Case>& kind,
                                      size_t features) {
  constexpr int kCases = 4000;
  std::map<std::string, int> counts;
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    for (const auto& feature : kind.features(kind.draw(seed, 2))) {
      ++counts[feature];
    }
  }
  for (const auto& [feature, count] : counts) {
    EXPECT_GE(count * 80, kCases) << feature;
  }
  EXPECT_GE(counts.size(), features);
}

}  // namespace lockstep::internal::fuzz

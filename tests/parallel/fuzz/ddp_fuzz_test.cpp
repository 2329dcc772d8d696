// Compares random modules, options and schedules with LibTorch alone.
// ddp_fuzz.cpp runs more of them, and reduces a failing one.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fuzz/draw_case.h"
#include "tests/parallel/fuzz/features.h"
#include "tests/parallel/fuzz/rank_run.h"

namespace lockstep::internal::fuzz {
namespace {

// Runs the cases of the seeds until one fails on some rank.
void expect_cases_pass(const std::string& backend, uint64_t begin,
                       uint64_t end) {
  const auto group =
      init_process_group(backend, {.timeout = std::chrono::seconds(10)});
  at::set_num_threads(1);
  for (uint64_t seed = begin; seed < end; ++seed) {
    const auto outcome = run_on_rank(draw_case(seed, group->size()));
    EXPECT_NE(outcome.verdict, Verdict::failed)
        << outcome.reason << "; ddp_fuzz --world " << group->size()
        << " --backend " << backend << " --seeds " << seed << " --reduce";
    auto failed = torch::tensor(outcome.verdict == Verdict::failed ? 1 : 0);
    all_reduce(failed);
    if (failed.item<int64_t>() > 0) return;
  }
}

WORLD_TEST(DdpFuzz, TrainsAsOneProcessOnSharedMemory, 2, 3) {
  expect_cases_pass("lockstep", 0, 150);
}

WORLD_TEST(DdpFuzz, TrainsAsOneProcessOnGloo, 2, 3) {
  expect_cases_pass("gloo", 1000, 1075);
}

// A rarer feature would show its faults too late.
TEST(DdpFuzzDraw, EachFeatureIsInOneOfEightyCases) {
  constexpr int kCases = 4000;
  std::map<std::string, int> counts;
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    for (const auto& feature : features_of(draw_case(seed, 2))) {
      ++counts[feature];
    }
  }
  for (const auto& [feature, count] : counts) {
    EXPECT_GE(count * 80, kCases) << feature;
  }
  EXPECT_GE(counts.size(), 60U);
}

}  // namespace
}  // namespace lockstep::internal::fuzz

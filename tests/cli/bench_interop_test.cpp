// `lockstep bench --peers`: measures Python's torch.distributed in the same
// run.
#include <gmock/gmock.h>

#include "tests/cli/bench_command.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class BenchPeers : public BenchTest {};

TEST_F(BenchPeers, PythonDoesEveryOperationRightInTurnsWithOurs) {
  const std::string python = LOCKSTEP_TORCH_PYTHON;
  const auto document =
      bench_json({"all", "--peers=python", "--python", python, "--ranks=3",
                  "--sizes=1000", "--iters=2", "--warmup=1", "--rounds=2"});
  expect_plausible(document);
  EXPECT_EQ(document.at("sides").at("python").at("backend"), "gloo");
  const json& results = document.at("results");
  ASSERT_EQ(results.size(), 20u);
  for (size_t i = 0; i < results.size(); i += 2) {
    const json& ours = results[i];
    const json& peer = results[i + 1];
    EXPECT_EQ(ours.at("side"), "lockstep");
    EXPECT_EQ(peer.at("side"), "python");
    for (const char* same : {"operation", "dtype", "ranks", "bytes"}) {
      EXPECT_EQ(ours.at(same), peer.at(same));
    }
    ASSERT_EQ(peer.at("rounds").size(), 2u);
    const auto p50 = [](const json& entry) {
      return entry.at("latency_us").at("p50").get<double>();
    };
    const double by = p50(peer) / p50(ours);
    EXPECT_NEAR(peer.at("ratio"), by, 0.01 * by);
    EXPECT_LE(peer.at("ratio_min"), peer.at("ratio_max"));
    EXPECT_FALSE(ours.contains("ratio"));
  }
}

TEST_F(BenchPeers, APythonWithoutLockstepTorchIsOneLine) {
  const auto result =
      bench({"all_reduce", "--peers=python-lockstep", "--python",
             LOCKSTEP_TORCH_PYTHON, "--sizes=4", "--iters=1"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("has no backend lockstep"),
                                HasSubstr("install lockstep-torch there")));
  EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
}

TEST_F(BenchPeers, WhatAPeerCannotDoIsSaidAndOursIsTimed) {
  // Python's Gloo does not reduce 16-bit integers.
  const std::string path = scratch() / "bench.json";
  const auto result =
      bench({"all_reduce", "--peers=python", "--python", LOCKSTEP_TORCH_PYTHON,
             "--sizes=1000,8", "--iters=1", "--rounds=1", "--dtype=int16",
             "--json", path});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err,
              HasSubstr("lockstep bench: python: all_reduce of 500 int16 over "
                        "2 ranks: "));
  EXPECT_EQ(count(result.err, "\n"), 2) << result.err;
  EXPECT_EQ(count(result.out, "        -      -\n"), 2) << result.out;
  const auto results = json::parse(read_file(path)).at("results");
  ASSERT_EQ(results.size(), 4u);
  EXPECT_EQ(results[0].at("wrong"), 0);
  EXPECT_FALSE(results[1].at("error").get<std::string>().empty());
  EXPECT_FALSE(results[1].contains("latency_us"));
}

}  // namespace
}  // namespace lockstep::internal::testing

// Peers of `lockstep bench` that need no Python: other sides of ours, and the
// programs of `./dev bench comm`.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>

#include "tests/cli/bench_command.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BenchPlainPeers : public BenchTest {
 protected:
  static bool has_openmpi() {
    return fs::exists(LOCKSTEP_BIN_DIR "/benchmarks/openmpi_peer");
  }
  static std::string programs() {
    const std::string folder = LOCKSTEP_BIN_DIR "/benchmarks/";
    return "protocol=" + folder + "protocol_peer,kernel=" + folder +
           "protocol_peer" +
           (has_openmpi() ? ",openmpi=" + folder + "openmpi_peer" : "");
  }
};

TEST_F(BenchPlainPeers, EverySideReducesRightWithinAndBeyondTheCores) {
  const auto document =
      bench_json({"all_reduce", "--peers=registered," + programs() + ",gloo",
                  "--nproc-per-node=2,5", "--sizes=4,1000,300K", "--iters=2",
                  "--warmup=1", "--rounds=2"});
  expect_plausible(document);
  std::vector<std::string> sides{"lockstep", "registered", "protocol",
                                 "kernel"};
  if (has_openmpi()) sides.push_back("openmpi");
  sides.push_back("gloo");
  for (const auto& side : sides) {
    EXPECT_TRUE(document.at("sides").contains(side)) << side;
  }
  const json& results = document.at("results");
  ASSERT_EQ(results.size(), 6 * sides.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].at("side"), sides[i % sides.size()]);
    EXPECT_EQ(results[i].at("rounds").size(), 2u);
    EXPECT_EQ(results[i].contains("ratio"), i % sides.size() != 0);
  }
}

TEST_F(BenchPlainPeers, EveryDTypeAndReductionThatASideTakesIsRight) {
  for (const std::string op : {"avg", "product", "max"}) {
    const auto document =
        bench_json({"all_reduce", "--peers=" + programs(), "--op=" + op,
                    "--dtype=float32,float64,float16,bfloat16", "--ranks=3",
                    "--sizes=40000", "--iters=1", "--rounds=1"});
    for (const json& entry : document.at("results")) {
      SCOPED_TRACE(entry.dump());
      if (entry.contains("error")) {
        EXPECT_EQ(entry.at("side"), "openmpi");
      } else {
        EXPECT_EQ(entry.at("wrong"), 0);
      }
    }
  }
  expect_plausible(
      bench_json({"all_reduce", "--peers=" + programs(), "--op=bxor",
                  "--dtype=int8,uint8,int32,int64", "--ranks=3",
                  "--sizes=40000", "--iters=1", "--rounds=1"}));
}

TEST_F(BenchPlainPeers, WhatDoesOnlyAllReduceIsLeftOutOfOtherOperations) {
  const auto document =
      bench_json({"broadcast", "--peers=registered," + programs(),
                  "--sizes=1000", "--iters=1", "--rounds=1"});
  const json& results = document.at("results");
  ASSERT_GE(results.size(), 4u);
  EXPECT_EQ(results[1].at("wrong"), 0);
  for (const int side : {2, 3}) {
    EXPECT_THAT(results[side].at("error").get<std::string>(),
                HasSubstr("all_reduce"));
  }
}

TEST_F(BenchPlainPeers, InterruptLeavesNoProcessOfProgramsThatStartRanks) {
  auto program =
      start_bench({"all_reduce", "--peers=" + programs(), "--ranks=3",
                   "--sizes=1K", "--iters=1000000", "--timeout=300"});
  program->await_output("bytes");  // ranks are connected and at work
  program->signal(SIGINT);
  EXPECT_EQ(program->finish().exit_code, 128 + SIGINT);
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

TEST_F(BenchPlainPeers, KilledItLeavesNoProcess) {
  auto program =
      start_bench({"all_reduce", "--peers=" + programs(), "--ranks=3",
                   "--sizes=1K", "--iters=1000000", "--timeout=300"});
  program->await_output("bytes");
  program->signal(SIGKILL);
  program->finish();
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

}  // namespace
}  // namespace lockstep::internal::testing

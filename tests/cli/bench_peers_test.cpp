// Peers of `lockstep bench` that need no Python, and the plot of all sides.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <set>

#include "tests/cli/bench_command.h"
#include "tests/cli/xml_element.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BenchPlainPeers : public BenchTest {
 protected:
  static bool has_openmpi() {
    return fs::exists(LOCKSTEP_LIBEXEC_DIR "/lockstep-bench-openmpi");
  }
  static std::vector<std::string> expected_sides() {
    std::vector<std::string> all{"lockstep", "registered", "protocol",
                                 "kernel"};
    if (has_openmpi()) all.push_back("openmpi");
    all.push_back("gloo");
    return all;
  }
};

constexpr const char* kPeers =
    "--peers=registered,protocol,kernel,openmpi,gloo";

TEST_F(BenchPlainPeers, EverySideReducesRightWithinAndBeyondTheCores) {
  const auto document = bench_json(
      {"all_reduce", kPeers, "--nproc-per-node=2,5", "--sizes=4,1000,300K",
       "--iters=2", "--warmup=1", "--rounds=2"});
  expect_plausible(document);
  const auto sides = expected_sides();
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
        bench_json({"all_reduce", "--peers=protocol,kernel,openmpi",
                    "--op=" + op, "--dtype=float32,float64,float16,bfloat16",
                    "--ranks=3", "--sizes=40000", "--iters=1", "--rounds=1"});
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
      bench_json({"all_reduce", "--peers=protocol,kernel,openmpi", "--op=bxor",
                  "--dtype=int8,uint8,int32,int64", "--ranks=3",
                  "--sizes=40000", "--iters=1", "--rounds=1"}));
}

TEST_F(BenchPlainPeers, WhatDoesOnlyAllReduceIsLeftOutOfOtherOperations) {
  const auto document =
      bench_json({"broadcast", "--peers=registered,protocol,kernel",
                  "--sizes=1000", "--iters=1", "--rounds=1"});
  const json& results = document.at("results");
  ASSERT_EQ(results.size(), 4u);
  EXPECT_EQ(results[1].at("wrong"), 0);
  for (const int side : {2, 3}) {
    EXPECT_THAT(results[side].at("error").get<std::string>(),
                HasSubstr("all_reduce"));
  }
}

TEST_F(BenchPlainPeers, ThePlotHasALineOfEverySideWithAPointOfEverySize) {
  const std::string path = scratch() / "plot.svg";
  const auto result =
      bench({"all_reduce", kPeers, "--sizes=4,1000,64K,1M", "--iters=1",
             "--rounds=1", "--dtype=float32,int32", "--plot", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto svg = parse_xml(read_file(path));
  EXPECT_EQ(svg.name, "svg");
  EXPECT_EQ(svg.attributes.at("xmlns"), "http://www.w3.org/2000/svg");
  const auto lines = svg.all("polyline");
  const auto sides = expected_sides();
  ASSERT_EQ(lines.size(), 2 * sides.size());  // two dtypes
  std::set<std::string> ids;
  for (const auto* line : lines) {
    std::istringstream points(line->attributes.at("points"));
    double last = 0;
    int found = 0;
    double x = 0;
    double y = 0;
    for (char comma; points >> x >> comma >> y; ++found) {
      EXPECT_GT(x, last);  // more bytes are farther to the right
      last = x;
      EXPECT_GT(y, 0);
      EXPECT_LT(y, std::stod(svg.attributes.at("height")));
    }
    EXPECT_EQ(found, 4) << line->attributes.at("points");
    ids.insert(line->attributes.at("id"));
  }
  EXPECT_EQ(ids.size(), lines.size());
  // The legend.
  std::vector<std::string> titles;
  for (const auto* title : svg.all("title")) titles.push_back(title->text);
  titles.resize(sides.size());
  EXPECT_EQ(titles, sides);
}

TEST_F(BenchPlainPeers, WithoutMpirunOpenMpiIsLeftOutWithOneLine) {
  if (!has_openmpi()) GTEST_SKIP() << "built without MPI";
  const auto result = bench(
      {"all_reduce", "--peers=openmpi", "--sizes=4", "--iters=1", "--rounds=1"},
      {.environment = {"PATH=/nowhere"}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.err,
      HasSubstr("lockstep bench: without openmpi: program \"mpirun\" was "));
  EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
}

TEST_F(BenchPlainPeers, InterruptLeavesNoProcessOfProgramsThatStartRanks) {
  auto program =
      start_bench({"all_reduce", "--peers=protocol,openmpi", "--ranks=3",
                   "--sizes=1K", "--iters=1000000", "--timeout=300"});
  program->await_output("bytes");  // ranks are connected and at work
  program->signal(SIGINT);
  EXPECT_EQ(program->finish().exit_code, 128 + SIGINT);
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

TEST_F(BenchPlainPeers, KilledItLeavesNoProcess) {
  auto program =
      start_bench({"all_reduce", "--peers=protocol,openmpi", "--ranks=3",
                   "--sizes=1K", "--iters=1000000", "--timeout=300"});
  program->await_output("bytes");
  program->signal(SIGKILL);
  program->finish();
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

}  // namespace
}  // namespace lockstep::internal::testing

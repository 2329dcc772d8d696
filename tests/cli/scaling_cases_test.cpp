// Tests what `lockstep report scaling` runs, and how it computes its tables.
#include <gmock/gmock.h>

#include "lockstep/cli/report/scaling_cases.h"
#include "lockstep/cli/report/scaling_result.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ScalingCases, ABatchOfAProcessStaysOrIsDivided) {
  const auto batch = [](Scaling scaling, ScalingSide side, int nproc) {
    return expand("--batch={batch:64}", scaling, side, nproc);
  };
  EXPECT_EQ(batch(Scaling::weak, ScalingSide::ranks, 4), "--batch=64");
  EXPECT_EQ(batch(Scaling::strong, ScalingSide::ranks, 4), "--batch=16");
  // One process does the work of four.
  EXPECT_EQ(batch(Scaling::weak, ScalingSide::threads, 4), "--batch=256");
  EXPECT_EQ(batch(Scaling::strong, ScalingSide::threads, 4), "--batch=64");
  EXPECT_EQ(batch(Scaling::weak, ScalingSide::compared, 4), "--batch=64");
}

TEST(ScalingCases, AGlobalBatchGrowsOrStays) {
  for (const auto side : {ScalingSide::ranks, ScalingSide::threads}) {
    EXPECT_EQ(expand("{global_batch:64}", Scaling::weak, side, 4), "256");
    EXPECT_EQ(expand("{global_batch:64}", Scaling::strong, side, 4), "64");
  }
}

TEST(ScalingCases, OtherTextStaysAsItIs) {
  EXPECT_EQ(expand("{nproc}x{nproc} {batch {} {x:1} ${nproc", Scaling::weak,
                   ScalingSide::ranks, 3),
            "3x3 {batch {} {x:1} ${nproc");
  EXPECT_EQ(expand("", Scaling::weak, ScalingSide::ranks, 3), "");
}

TEST(ScalingCases, AWrongBatchIsRefused) {
  const auto refused = [](const char* text) {
    return message_of(
        [&] { expand(text, Scaling::strong, ScalingSide::ranks, 3); });
  };
  EXPECT_THAT(refused("{batch:64}"),
              AllOf(HasSubstr("{batch:64}"), HasSubstr("3 processes")));
  EXPECT_THAT(refused("{batch:x}"), HasSubstr("\"x\""));
  EXPECT_THAT(refused("{global_batch:0}"), HasSubstr("\"0\""));
}

std::vector<std::string> names(const ScalingPlan& plan) {
  std::vector<std::string> all;
  for (const auto& one : cases_of(plan)) {
    all.push_back(std::string(name_of(one.scaling)) + " " + one.label());
  }
  return all;
}

TEST(ScalingCases, WithoutABatchScalingIsWeak) {
  EXPECT_THAT(
      names({.nproc = {1, 2}, .command = {"train"}}),
      ElementsAre("weak 1 rank", "weak 2 ranks", "weak 1 process, 2 threads"));
}

TEST(ScalingCases, OneProcessIsMeasuredOnce) {
  EXPECT_THAT(names({.nproc = {1, 2},
                     .command = {"train", "{batch:2}"},
                     .compare = "other {batch:2}"}),
              ElementsAre("weak 1 rank", "weak compared, 1", "weak 2 ranks",
                          "weak 1 process, 2 threads", "weak compared, 2",
                          "strong 2 ranks", "strong 1 process, 2 threads",
                          "strong compared, 2"));
}

TEST(ScalingTables, ComparesMediansWithOneProcess) {
  const ScalingPlan plan{
      .nproc = {1, 2}, .command = {"train", "{batch:2}"}, .compare = {}};
  const auto cases = cases_of(plan);
  ASSERT_EQ(cases.size(), 5u);
  const auto rates = [](double a, double b, double c) {
    return std::vector<ScalingMeasurement>{
        {.samples_per_s = a, .seconds = 1, .target_s = 3},
        {.samples_per_s = b, .seconds = 2, .target_s = 1},
        {.samples_per_s = c, .seconds = 9, .target_s = 2}};
  };
  auto measured = std::vector{rates(100, 90, 1000), rates(150, 180, 160),
                              rates(110, 120, 130), rates(130, 140, 120),
                              rates(80, 90, 100)};
  measured[4][1].target_s.reset();
  const auto tables = make_tables(cases, measured);
  ASSERT_EQ(tables.size(), 2u);
  const auto& weak = tables[0].rows;
  ASSERT_EQ(weak.size(), 3u);
  EXPECT_EQ(weak[1].which.label(), "2 ranks");
  EXPECT_EQ(weak[1].samples_per_s, 160);
  EXPECT_EQ(weak[1].least_samples_per_s, 150);
  EXPECT_EQ(weak[1].most_samples_per_s, 180);
  EXPECT_EQ(weak[1].seconds, 2);
  EXPECT_DOUBLE_EQ(weak[1].speed_up, 1.6);
  EXPECT_DOUBLE_EQ(weak[1].efficiency, 0.8);
  EXPECT_DOUBLE_EQ(weak[1].core_seconds, 12.5);
  EXPECT_EQ(weak[1].target_s, 2);
  const auto& strong = tables[1].rows;
  ASSERT_EQ(strong.size(), 3u);
  EXPECT_EQ(strong[0].samples_per_s, 100);
  EXPECT_EQ(strong[0].efficiency, 1);
  EXPECT_EQ(strong[1].samples_per_s, 130);
  EXPECT_EQ(strong[2].which.label(), "1 process, 2 threads");
  // In one round it was not met.
  EXPECT_FALSE(strong[2].target_s);
  EXPECT_EQ(cells_of(tables[1], "loss<=1")[3].back(), "not met");

  EXPECT_EQ(result_text(tables),
            "2 ranks train 1.60 times as fast as one (80 % of ideal), and 1.33 "
            "times as fast as one process with 2 threads. 2 ranks train 1.30 "
            "times as fast as one (65 % of ideal), and 1.44 times as fast as "
            "one process with 2 threads, if they divide the batch of one "
            "process.");
  EXPECT_EQ(result_text(make_tables({cases[0]}, {measured[0]})),
            "Only one process was measured, with 100 samples/s.");
}

TEST(ScalingTables, ABusyMachineIsWarnedAbout) {
  const auto warning = [](double load, int cores) {
    return load_warning({{"cores", cores}, {"load_before", load}});
  };
  EXPECT_EQ(warning(0, 2), "");
  EXPECT_EQ(warning(0.39, 2), "");
  EXPECT_THAT(warning(1.5, 2), HasSubstr("a load of 1.50 on 2 cores"));
  EXPECT_EQ(warning(1.5, 64), "");
}

}  // namespace
}  // namespace lockstep::internal::testing

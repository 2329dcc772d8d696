// Pipeline schedules as data: text and files, what the check refuses, and the
// formulas for bubbles. schedule_parity_test.cpp compares them with PyTorch's.

#include <gmock/gmock.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedule_simulation.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refusal(const std::string& csv) {
  return message_of([&] { check_pipeline_schedule(parse_pipeline_csv(csv)); });
}

TEST(PipelineSchedule, TextComesBack) {
  for (const char* text : {"0F0", "12B3", "2I1", "2W1", "3SEND_F1", "4RECV_F1",
                           "3SEND_B15", "2RECV_B0"}) {
    EXPECT_EQ(to_string(parse_pipeline_action(text)), text);
  }
  EXPECT_EQ(to_string(parse_pipeline_slot(" 1UNSHARD ")), "1UNSHARD");
  EXPECT_EQ(parse_pipeline_slot("(0F4;3B1)OVERLAP_F_B").size(), 2);
  EXPECT_EQ(to_string(parse_pipeline_slot("(0F4;3B1)OVERLAP_F_B")),
            "(0F4;3B1)OVERLAP_F_B");
  for (const char* text : {"F0", "0F", "0X1", "0F-1", "0F1x", "-1F0", "0FF1",
                           "99999999999F0", "(0F1;1B0)", "(0F1;1B0"}) {
    EXPECT_THAT(message_of([&] { parse_pipeline_slot(text); }),
                HasSubstr(text));
  }
}

TEST(PipelineSchedule, FilesComeBackAndNameTheWrongField) {
  TemporaryFolder folder;
  for (const PipelineSchedule& schedule :
       {schedule_interleaved_zero_bubble(3, 6, 2), schedule_dual_pipe_v(2, 5),
        with_messages(schedule_zbv_zero_bubble(2, 4)),
        PipelineSchedule{{{{}}, {}, {{}, {}}}}}) {
    save_pipeline_csv(schedule, folder.file("schedule.csv"));
    EXPECT_EQ(load_pipeline_csv(folder.file("schedule.csv")), schedule);
  }
  EXPECT_THAT(message_of([] { parse_pipeline_csv("0F0,,0B0\n1F0,1Q0"); }),
              HasSubstr("line 2, field 2: \"1Q0\""));
  EXPECT_THAT(message_of([&] { load_pipeline_csv(folder.file("none")); }),
              HasSubstr("No such file"));
}

TEST(PipelineSchedule, TheTableIsAligned) {
  EXPECT_EQ(to_table(aligned(schedule_1f1b(2, 3))),
            "rank 0 | 0F0 0F1     0B0 0F2 0B1     0B2\n"
            "rank 1 |     1F0 1B0 1F1 1B1 1F2 1B2\n");
}

TEST(PipelineSchedule, NumbersThatCannotBeAreRefused) {
  EXPECT_THAT(message_of([] { schedule_1f1b(4, 3); }),
              HasSubstr("at least as"));
  EXPECT_THAT(message_of([] { schedule_gpipe(0, 3); }), HasSubstr("0 ranks"));
  EXPECT_THAT(message_of([] { schedule_gpipe(2, 0); }),
              HasSubstr("0 micro-batches"));
  EXPECT_THAT(message_of([] { schedule_interleaved_1f1b(2, 5, 2); }),
              HasSubstr("a multiple of 2, such as 4"));
  EXPECT_THAT(message_of([] { schedule_dual_pipe_v(2, 3); }),
              HasSubstr("at least as many as stages"));
  EXPECT_THAT(message_of([] { make_pipeline_schedule("ZBV", 2, 4, 2); }),
              HasSubstr("ZBVZeroBubble"));
  EXPECT_THAT(
      message_of([] { make_pipeline_schedule("zbvZeroBubble", 2, 4, 3); }),
      HasSubstr("2 stages a rank, but 3"));
}

TEST(PipelineScheduleCheck, WrongSchedulesAreNamed) {
  EXPECT_THAT(refusal(""), HasSubstr("empty"));
  EXPECT_THAT(refusal("0F0,0B0\n2F0,2B0"), HasSubstr("no rank has stage 1"));
  EXPECT_THAT(refusal("0F0,0B0\n0F1,0B1"),
              HasSubstr("stage 0 is on rank 0 and on rank 1"));
  EXPECT_THAT(refusal("0F0,0B0,0F0"), HasSubstr("0F0 is given twice"));
  EXPECT_THAT(refusal("0F0,0B0,0F1"), HasSubstr("0B1 is missing"));
  EXPECT_THAT(refusal("0F0,0I0"), HasSubstr("0W0 is missing"));
  EXPECT_THAT(refusal("0F0,0W0"), HasSubstr("0I0 is missing"));
  EXPECT_THAT(refusal("0F0,0B0,0W0"), HasSubstr("the same backward in parts"));
  EXPECT_THAT(refusal("0F1,0B1"), HasSubstr("0F0 is missing"));
  EXPECT_THAT(refusal("0B0,0F0"), HasSubstr("0B0 without 0F0 before it"));
  EXPECT_THAT(refusal("0F0,0W0,0I0"), HasSubstr("0W0 without 0I0"));
  EXPECT_THAT(refusal("0F0,0B0\n1B0,1F0"), HasSubstr("1B0 without 1F0"));
  EXPECT_THAT(refusal("0F0,1B0,1F0,0B0"), HasSubstr("1B0 without 1F0"));
  EXPECT_THAT(refusal("0F0,0SEND_F0,0B0\n1F0,1B0"),
              HasSubstr("0SEND_F0 is given without 1RECV_F0"));
}

// A rank that receives first what its peer sends second waits for ever if sends
// block: each of the two waits for the other.
TEST(PipelineScheduleCheck, AFirstReceiveThatWaitsForALaterSendIsADeadlock) {
  const std::string right =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";
  EXPECT_THAT(
      check_pipeline_schedule(parse_pipeline_csv(right)).peak_activations,
      ElementsAre(2, 1));
  std::string crossed = right;
  crossed.replace(crossed.find("1RECV_F0,1F0,1RECV_F1"), 21,
                  "1RECV_F1,1RECV_F0,1F0");
  EXPECT_THAT(
      refusal(crossed),
      HasSubstr("rank 0 waits in 0SEND_F0 until rank 1 is at 1RECV_F0; "
                "rank 1 waits in 1RECV_F1 until rank 0 is at 0SEND_F1"));
  // Both send before they receive.
  EXPECT_THAT(refusal("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"),
              HasSubstr("rank 0 waits in 0SEND_F1 until rank 1 is at 1RECV_F1; "
                        "rank 1 waits in 1SEND_B0"));
}

TEST(PipelineScheduleCheck, RanksThatWaitForEachOtherAreNamed) {
  EXPECT_THAT(refusal("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"),
              HasSubstr("rank 0 waits before 0B0 for 0RECV_B0; rank 1 waits "
                        "before 1F1 for 1RECV_F1"));
}

TEST(PipelineScheduleCheck, PeakActivations) {
  EXPECT_THAT(check_pipeline_schedule(schedule_gpipe(3, 7)).peak_activations,
              ElementsAre(7, 7, 7));
  EXPECT_THAT(check_pipeline_schedule(schedule_1f1b(4, 9)).peak_activations,
              ElementsAre(4, 3, 2, 1));
  // Two stages a rank, each of half the size, need the memory of 1F1B.
  EXPECT_THAT(
      check_pipeline_schedule(schedule_zbv_zero_bubble(3, 8)).peak_activations,
      ElementsAre(6, 6, 6));
}

TEST(PipelineScheduleCheck, KnowsThePlaces) {
  const auto facts = check_pipeline_schedule(schedule_zbv_zero_bubble(2, 4));
  EXPECT_THAT(facts.rank_of_stage, ElementsAre(0, 1, 1, 0));
  EXPECT_EQ(facts.micro_batches, 4);
}

TEST(PipelineSimulation, BubblesFollowTheFormulas) {
  for (const int p : {1, 2, 4, 8}) {
    for (const int m : {p, 2 * p, 4 * p}) {
      SCOPED_TRACE(std::to_string(p) + " ranks, " + std::to_string(m));
      const double lost = p - 1;
      EXPECT_NEAR(simulate_pipeline(schedule_gpipe(p, m)).bubble_fraction,
                  lost / (m + lost), 1e-12);
      EXPECT_NEAR(simulate_pipeline(schedule_1f1b(p, m)).bubble_fraction,
                  lost / (m + lost), 1e-12);
      for (const int v : {2, 3}) {
        EXPECT_NEAR(simulate_pipeline(schedule_interleaved_1f1b(p, m, v))
                        .bubble_fraction,
                    lost / (m * v + lost), 1e-12);
      }
      // ZB-H1: a rank loses forward + backward for inputs - for parameters for
      // each rank after it.
      EXPECT_NEAR(simulate_pipeline(schedule_interleaved_zero_bubble(p, m, 1))
                      .bubble_fraction,
                  lost / (3 * m + lost), 1e-12);
    }
  }
}

// Each rank begins one forward after the rank before it, and ends as much
// later: between, ZBV is never idle.
TEST(PipelineSimulation, ZbvHasNoBubbleWithinARank) {
  for (const int p : {2, 3, 4, 8}) {
    for (const int m : {2 * p, 2 * p + 3}) {
      const PipelineTimes times =
          simulate_pipeline(schedule_zbv_zero_bubble(p, m));
      std::vector<double> first(static_cast<size_t>(p), 1e9),
          last(first.size());
      for (const auto& span : times.spans) {
        const auto rank = static_cast<size_t>(span.rank);
        first[rank] = std::min(first[rank], span.begin);
        last[rank] = std::max(last[rank], span.end);
      }
      for (size_t rank = 0; rank < first.size(); ++rank) {
        EXPECT_EQ(times.busy[rank], 6 * m);
        EXPECT_EQ(last[rank] - first[rank], 6 * m) << p << " " << m;
      }
    }
  }
}

TEST(PipelineSimulation, CostsOfStagesAndMessagesCount) {
  const PipelineTimes times = simulate_pipeline(
      schedule_gpipe(2, 1), {.message = 0.5, .stages = {1, 2}});
  EXPECT_EQ(times.makespan, 1 + 0.5 + 2 + 4 + 0.5 + 2);
  EXPECT_THAT(times.busy, ElementsAre(3, 6));
  EXPECT_THAT(message_of([] {
                simulate_pipeline(schedule_gpipe(2, 1), {.stages = {1}});
              }),
              HasSubstr("1 stages, but the schedule has 2"));
}

}  // namespace
}  // namespace lockstep::internal::testing

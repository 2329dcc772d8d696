// Tests what `lockstep status` and `lockstep top` show of a job, without a job.
#include "lockstep/cli/jobs/job_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/cli/jobs/view_text.h"

namespace lockstep::internal {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Look = ViewLine::Look;

constexpr int64_t kSecond = 1'000'000'000;

WorkerView worker(int rank) {
  return {.worker = {.local_rank = rank, .rank = rank, .pid = 1234567 + rank},
          .state = "running",
          .steps = 123456,
          .steps_per_second = 100.0 - rank,
          .samples_per_second = 12800,
          .comm_share = 0.5,
          .cpu_share = 1,
          .resident_bytes = 147 << 20,
          .snapshot_seconds = 3723,
          .operation = "reduce_scatter_tensor_c 123456 (a group of a long nam)",
          .operation_seconds = 12.34};
}

JobView view_of_ranks(int ranks) {
  JobView view;
  view.status.run_id = "one";
  for (int rank = 0; rank < ranks; ++rank) {
    view.workers.push_back(worker(rank));
    view.status.workers.push_back(view.workers.back().worker);
  }
  return view;
}

WorkerTable table_of(const JobView& view, const TableLayout& layout) {
  std::vector<size_t> widths;
  return worker_table(view, layout, widths);
}

// Returns the first words of the lines after the titles.
std::vector<std::string> ranks_of(const WorkerTable& table) {
  std::vector<std::string> ranks;
  for (size_t i = 1; i < table.lines.size(); ++i) {
    const std::string& text = table.lines[i].text;
    const size_t begin = text.find_first_not_of(' ');
    ranks.push_back(text.substr(begin, text.find(' ', begin) - begin));
  }
  return ranks;
}

// A terminal of 80 columns cut the last column, which says where a rank is.
TEST(JobView, WhatIsUnderWayIsNeverCutAtEightyCharacters) {
  const JobView view = view_of_ranks(2);
  const WorkerTable table = table_of(view, {.most_characters = 80});
  ASSERT_EQ(table.lines.size(), 3u);
  for (const ViewLine& line : table.lines) EXPECT_LE(line.text.size(), 80u);
  EXPECT_THAT(table.lines[1].text,
              HasSubstr("reduce_scatter_tensor_c 123456 (a group of a long "
                        "nam), 12.3 s"));
  EXPECT_THAT(table.lines[1].text, HasSubstr("running"));
  EXPECT_THAT(table.left_out, Contains("pid"));
  EXPECT_THAT(table.left_out, Not(Contains("state")));
  // Even if it alone is too long.
  EXPECT_THAT(table_of(view, {.most_characters = 10}).lines[1].text,
              HasSubstr("12.3 s"));

  const WorkerTable all = table_of(view, {});
  EXPECT_THAT(all.left_out, IsEmpty());
  EXPECT_THAT(all.lines[1].text, HasSubstr("1234567"));
}

TEST(JobView, ShortOperationsLeaveRoomForMoreColumns) {
  JobView view = view_of_ranks(2);
  for (auto& one : view.workers) {
    one.operation = "all_reduce 604 (default_pg)";
    one.operation_seconds = 0;
  }
  const WorkerTable table = table_of(view, {.most_characters = 80});
  EXPECT_THAT(table.lines[0].text, HasSubstr("steps/s"));
  EXPECT_THAT(table.left_out, Contains("snapshot"));
}

TEST(JobView, AJobWithoutWorkersHasTitles) {
  EXPECT_THAT(table_of(view_of_ranks(0), {}).lines[0].text, HasSubstr("rank"));
}

TEST(JobView, ColumnsDoNotBecomeNarrowerFromPictureToPicture) {
  JobView view = view_of_ranks(1);
  std::vector<size_t> widths;
  const std::string wide = worker_table(view, {}, widths).lines[0].text;
  view.workers[0].steps = 1;
  view.workers[0].operation.clear();
  view.workers[0].operation_seconds.reset();
  EXPECT_EQ(worker_table(view, {}, widths).lines[0].text, wide);
}

TEST(JobView, WorkersAreSortedByAnyColumn) {
  JobView view = view_of_ranks(4);
  const auto order = [&](const char* column, bool is_reversed) {
    return ranks_of(
        table_of(view, {.sorted_by = column, .is_reversed = is_reversed}));
  };
  using Ranks = std::vector<std::string>;
  EXPECT_EQ(order("rank", false), (Ranks{"0", "1", "2", "3"}));
  EXPECT_EQ(order("rank", true), (Ranks{"3", "2", "1", "0"}));
  EXPECT_EQ(order("steps/s", false), (Ranks{"0", "1", "2", "3"}));
  EXPECT_EQ(order("steps/s", true), (Ranks{"3", "2", "1", "0"}));
  view.workers[1].comm_share = 0.9;
  view.workers[2].comm_share.reset();
  view.workers[3].comm_share = 0.1;
  EXPECT_EQ(order("comm", false), (Ranks{"1", "0", "3", "2"}));
  EXPECT_EQ(order("comm", true), (Ranks{"3", "0", "1", "2"}))
      << "what is not known is last";
  view.workers[3].state = "SIGKILL";
  view.workers[3].worker.exit_code = 137;
  view.workers[1].state = "stopped";
  EXPECT_EQ(order("state", false), (Ranks{"3", "1", "0", "2"}));
}

TEST(JobView, APartOfTheWorkersIsShown) {
  const JobView view = view_of_ranks(10);
  using Ranks = std::vector<std::string>;
  const auto part = [&](size_t first, size_t most) {
    return ranks_of(
        table_of(view, {.first_worker = first, .most_workers = most}));
  };
  EXPECT_EQ(part(3, 2), (Ranks{"3", "4"}));
  EXPECT_EQ(part(8, 5), (Ranks{"8", "9"}));
  EXPECT_EQ(part(20, 5), (Ranks{}));
}

TEST(JobView, ColoursAreThereOnlyIfTheyAreAskedFor) {
  JobView view = view_of_ranks(4);
  view.workers[1].state = "SIGKILL";
  view.workers[1].worker.exit_code = 137;
  view.workers[2].state = "silent";
  view.slowest_rank = 3;
  EXPECT_THAT(view_text(view, false), Not(HasSubstr("\033")));
  const auto lines = table_of(view, {}).lines;
  EXPECT_EQ(lines[0].look, Look::title);
  EXPECT_EQ(lines[1].look, Look::plain);
  EXPECT_EQ(lines[2].look, Look::trouble);
  EXPECT_EQ(lines[3].look, Look::notice);
  EXPECT_EQ(lines[4].look, Look::notice) << "the others wait for it";
  EXPECT_THAT(view_text(view, true), HasSubstr("\033[31m   1"));
}

TEST(JobView, TheWorkersTogetherHaveALine) {
  JobView view = view_of_ranks(2);
  view.workers[0].resident_bytes.reset();
  EXPECT_THAT(view_text(view, false),
              HasSubstr("\ntogether: 25600 samples/s, 200 % CPU, 147 MiB\n"));
  EXPECT_THAT(view_text(view_of_ranks(1), false), Not(HasSubstr("together")));
}

// It changed with each picture when all ranks were about equally fast.
TEST(JobView, TheRankThatIsWaitedForIsNamedOnceThatHasLasted) {
  LastingRank rank;
  int64_t now = 1000 * kSecond;
  EXPECT_EQ(rank.update(std::nullopt, now), std::nullopt);
  EXPECT_EQ(rank.update(1, now += kSecond), std::nullopt);
  EXPECT_EQ(rank.update(2, now += kSecond), std::nullopt);
  EXPECT_EQ(rank.update(1, now += kSecond), std::nullopt);
  EXPECT_EQ(rank.update(1, now += 2 * kSecond), std::nullopt);
  EXPECT_EQ(rank.update(1, now += kSecond), 1);
  EXPECT_EQ(rank.update(std::nullopt, now += kSecond), 1);
  EXPECT_EQ(rank.update(2, now += kSecond), 1);
  EXPECT_EQ(rank.update(1, now += kSecond), 1);
  EXPECT_EQ(rank.update(std::nullopt, now += kSecond), 1);
  EXPECT_EQ(rank.update(std::nullopt, now += 3 * kSecond), std::nullopt);
}

}  // namespace
}  // namespace lockstep::internal

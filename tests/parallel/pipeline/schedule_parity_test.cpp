// Compares the schedules with PyTorch's, action by action: all of them for at
// most 8 ranks, 16 micro-batches and 4 stages a rank, with and without
// messages, and which numbers are refused.

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal::testing {
namespace {

std::string python_tables(const std::string& path) {
  run_python_peer({.arguments = {LOCKSTEP_SOURCE_DIR
                                 "/tests/parallel/pipeline/schedule_peer.py",
                                 path},
                   .allowed = std::chrono::seconds(200)});
  return read_file(path);
}

std::string next_lines(std::istream& in, int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) {
    std::string line;
    std::getline(in, line);
    lines += line + "\n";
  }
  return lines;
}

TEST(PipelineScheduleParity, EachActionIsPythons) {
  if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  TemporaryFolder folder;
  std::istringstream in(python_tables(folder.file("tables.csv")));
  int compared = 0;
  int refused = 0;
  for (std::string line; std::getline(in, line);) {
    SCOPED_TRACE(line);
    std::istringstream words(line);
    std::string name, problem;
    int ranks = 0, micro_batches = 0, stages = 0;
    words >> name >> ranks >> micro_batches >> stages >> problem;
    if (!problem.empty()) {
      ++refused;
      EXPECT_THROW(make_pipeline_schedule(name, ranks, micro_batches, stages),
                   std::invalid_argument);
      continue;
    }
    ++compared;
    const PipelineSchedule schedule =
        make_pipeline_schedule(name, ranks, micro_batches, stages);
    const std::string python = next_lines(in, ranks);
    ASSERT_EQ(to_csv(schedule), python);
    EXPECT_EQ(parse_pipeline_csv(python), schedule);
    const PipelineSchedule with = with_messages(schedule);
    ASSERT_EQ(to_csv(with), next_lines(in, ranks));
    EXPECT_EQ(check_pipeline_schedule(with).stages, ranks * stages);
  }
  // For the table of ./dev proof.
  std::cout << "compared " << compared << " tables and " << refused
            << " refusals\n";
  EXPECT_EQ(compared, 1780);
  EXPECT_EQ(refused, 1036);
}

}  // namespace
}  // namespace lockstep::internal::testing

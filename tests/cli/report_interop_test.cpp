// `lockstep report trace` on traces that torch.profiler wrote in two Python
// ranks with DistributedDataParallel. report_peer.py has their program, and
// compares the report with the traces, and the merged trace with what Perfetto
// reads in it.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

class ReportInterop : public LauncherTest {
 protected:
  const std::string peer_ = LOCKSTEP_SOURCE_DIR "/tests/cli/report_peer.py";
};

TEST_F(ReportInterop, TracesOfPythonRanksAreReportedAndMerged) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python with torch at " LOCKSTEP_TORCH_PYTHON;
  }
  const fs::path folder = scratch() / "traces";
  fs::create_directories(folder);
  auto job =
      start({"--nproc-per-node=2", peer_, "train", folder.string()},
            {.environment = {"PYTHON_EXEC=" LOCKSTEP_TORCH_PYTHON,
                             "OMP_NUM_THREADS=1",
                             // Otherwise torch leaves a folder in TMPDIR.
                             "TORCHINDUCTOR_CACHE_DIR=" + scratch().string()}});
  const auto trained = job->finish(std::chrono::seconds(100));
  ASSERT_EQ(trained.exit_code, 0) << trained.out << trained.err;

  const std::string merged = scratch() / "merged.json";
  const auto report = run_command(
      {"report", "trace", "--json", "--output", merged, folder.string()});
  ASSERT_EQ(report.exit_code, 0) << report.err;
  EXPECT_EQ(report.err, "");
  const std::string document = scratch() / "report.json";
  std::ofstream(document) << report.out;
  const auto checked = run_program({LOCKSTEP_TORCH_PYTHON, peer_, "check",
                                    folder.string(), document, merged});
  EXPECT_EQ(checked.exit_code, 0) << checked.err << report.out;
  const auto shown = run_program(
      {LOCKSTEP_TORCH_PYTHON, peer_, "perfetto", folder.string(), merged});
  if (shown.exit_code == 77) GTEST_SKIP() << "Perfetto's reader: " << shown.out;
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
}

}  // namespace
}  // namespace lockstep::internal::testing

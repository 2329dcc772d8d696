// `lockstep report trace` on traces that torch.profiler wrote in two Python
// ranks with DistributedDataParallel. report_peer.py has their program, and
// compares the report with the traces, and the merged trace with what Perfetto
// reads in it.
#include <gmock/gmock.h>

#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

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

// `lockstep run --metrics-port`.
TEST_F(ReportInterop, PrometheusReadsTheMetricsOfARunningJob) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python with torch at " LOCKSTEP_TORCH_PYTHON;
  }
  auto job = start({"--nproc-per-node=2", "--rdzv-id=a \"quoted\" name",
                    "--metrics-port=0", LOCKSTEP_BIN_DIR "/tests/inspect_ranks",
                    "train"});
  job->await_output("ready", 2);
  const std::string err = job->err();
  const size_t url = err.find("http://127.0.0.1:");
  ASSERT_NE(url, std::string::npos) << err;
  const auto result = run_program(
      {LOCKSTEP_TORCH_PYTHON, LOCKSTEP_SOURCE_DIR "/tests/cli/metrics_peer.py",
       err.substr(url, err.find('\n', url) - url)});
  job->signal(SIGTERM);
  job->finish();
  if (result.exit_code == 77) GTEST_SKIP() << "Prometheus: " << result.out;
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto metrics = nlohmann::json::parse(result.out);
  const auto& steps = metrics.at("lockstep_steps_total");
  EXPECT_EQ(steps["type"], "counter");
  EXPECT_EQ(steps["run_id"], "a \"quoted\" name");
  EXPECT_GT(steps["ranks"]["0"], 0);
  EXPECT_GT(steps["ranks"]["1"], 0);
  EXPECT_GT(metrics["lockstep_samples_total"]["ranks"]["1"], 0);
  EXPECT_EQ(metrics["lockstep_worker_up"]["ranks"]["1"], 1);
  EXPECT_EQ(metrics["lockstep_world_size"]["ranks"][""], 2);
  EXPECT_GT(metrics["lockstep_worker_cpu_seconds_total"]["ranks"]["0"], 0);
  EXPECT_GT(metrics["lockstep_worker_resident_memory_bytes"]["ranks"]["0"],
            10e6);
  const double now = std::chrono::duration<double>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count();
  EXPECT_NEAR(metrics["lockstep_last_step_timestamp_seconds"]["ranks"]["0"],
              now, 60);
}

}  // namespace
}  // namespace lockstep::internal::testing

// Tests what `lockstep doctor` makes of the programs that it starts, and its
// report.
#include <gmock/gmock.h>
#include <signal.h>

#include "lockstep/base/deadline.h"
#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/program_checks.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

CapturedProgram run_shell(const std::string& script,
                          milliseconds allowed = seconds(20)) {
  return run_captured("/bin/sh", {"-c", script}, allowed);
}

TEST(CapturedProgramOf, OutputAndEndAreKept) {
  const auto result = run_shell("echo out; echo one >&2; echo two >&2; exit 3");
  EXPECT_TRUE(result.in_time);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.last_line(), "two");
  EXPECT_FALSE(result.succeeded());
  EXPECT_EQ(run_shell("kill -TERM $$").exit_code, 128 + SIGTERM);
  EXPECT_EQ(run_shell("cat").out, "");  // no stdin
  EXPECT_EQ(run_shell("true").last_line(), "");
}

TEST(CapturedProgramOf, MuchOutputIsCutAndStopsNobody) {
  const auto result = run_shell("head -c 3000000 /dev/zero; echo end >&2");
  EXPECT_TRUE(result.succeeded());
  EXPECT_EQ(result.out.size(), size_t{1} << 20);
  EXPECT_EQ(result.err, "end\n");
}

// The shell waits for its child, so both must be killed.
TEST(CapturedProgramOf, AProgramThatDoesNotEndIsKilledWithItsChildren) {
  const auto result = run_shell("sleep 61 & echo $!; wait", milliseconds(300));
  EXPECT_FALSE(result.in_time);
  EXPECT_FALSE(result.succeeded());
  const std::string process = "/proc/" + std::to_string(std::stoi(result.out));
  const Deadline deadline = Deadline::after(seconds(20));
  // The killed child is a zombie until the init of this machine reaps it.
  const auto lives = [&] {
    const std::string status = read_file(process + "/status");
    return !status.empty() && status.find("State:\tZ") == std::string::npos;
  };
  while (lives() && !deadline.expired()) {
  }
  EXPECT_FALSE(lives());
}

TEST(CapturedProgramOf, AProgramThatCannotBeStartedThrows) {
  EXPECT_THROW(run_captured("/no/such/program", {}, seconds(20)),
               std::system_error);
}

const char* kTorch =
    R"({"version": "2.13.0", "cpu_capability": "AVX512", "threads": 2,
        "cuda": false, "gpus": 0, "backends": {"lockstep": null, "gloo": null,
        "nccl": "it was left out", "mpi": "no libmpi.so.40"}})";

TEST(DoctorLibTorch, VersionAndBackendsAreTold) {
  const auto findings = check_libtorch(CapturedProgram{.out = kTorch}, 0);
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].health, Health::ok);
  EXPECT_EQ(findings[0].found, "2.13.0, AVX512, 2 threads, for CPUs only");
  EXPECT_EQ(findings[0].values["version"], "2.13.0");
  EXPECT_EQ(findings[1].health, Health::ok);
  EXPECT_EQ(findings[1].found,
            "lockstep, gloo; without nccl, mpi (--json says why)");
  EXPECT_EQ(findings[1].advice, "");
  EXPECT_EQ(findings[1].values["mpi"], "no libmpi.so.40");
}

TEST(DoctorLibTorch, GpusThatItCannotUseAreTold) {
  const auto cpu_only = check_libtorch(CapturedProgram{.out = kTorch}, 2);
  EXPECT_EQ(cpu_only[0].health, Health::warn);
  EXPECT_THAT(cpu_only[0].advice, HasSubstr("--preset cuda"));
  EXPECT_EQ(cpu_only[1].health, Health::warn);
  EXPECT_THAT(cpu_only[1].advice, HasSubstr("nccl: it was left out."));
  auto torch = json::parse(kTorch);
  torch["cuda"] = true;
  torch["gpus"] = 2;
  EXPECT_EQ(check_libtorch(CapturedProgram{.out = torch.dump()}, 2)[0].health,
            Health::ok);
  torch["gpus"] = 1;
  const auto fewer = check_libtorch(CapturedProgram{.out = torch.dump()}, 2);
  EXPECT_EQ(fewer[0].health, Health::fail);
  EXPECT_THAT(fewer[0].advice, HasSubstr("sees 1 of 2 GPUs"));
}

TEST(DoctorLibTorch, AProgramThatIsMissingOrFailsIsTold) {
  const auto missing = check_libtorch(std::nullopt, 0);
  EXPECT_EQ(missing[0].health, Health::warn);
  EXPECT_THAT(missing[0].found, HasSubstr("lockstep-doctor-torch is missing"));
  const auto failed = check_libtorch(
      CapturedProgram{.exit_code = 127, .err = "libtorch.so: not there\n"}, 0);
  EXPECT_EQ(failed[0].health, Health::fail);
  EXPECT_THAT(failed[0].found,
              EndsWith("exit code 127: libtorch.so: not there"));
  const auto late = check_libtorch(CapturedProgram{.in_time = false}, 0);
  EXPECT_EQ(late[0].health, Health::fail);
  EXPECT_EQ(check_libtorch(CapturedProgram{.out = "{"}, 0)[0].health,
            Health::fail);
}

CapturedProgram measured(double latency_us) {
  const json document{{"results",
                       {{{"bytes", 4}, {"latency_us", {{"p50", latency_us}}}},
                        {{"bytes", 16 << 20},
                         {"latency_us", {{"p50", 3000.0}}},
                         {"busbw_gbps", 5.25}}}}};
  return {.out = document.dump()};
}

TEST(DoctorAllReduce, LatencyAndBandwidthAreTold) {
  const auto finding = check_all_reduce(measured(2.5));
  EXPECT_EQ(finding.health, Health::ok);
  EXPECT_EQ(finding.found, "2 ranks: 2.5 us for 4 B, 5.25 GB/s for 16 MiB");
  EXPECT_EQ(finding.values["latency_us"], 2.5);
  EXPECT_EQ(finding.values["bus_bandwidth_gbps"], 5.25);
  const auto slow = check_all_reduce(measured(4000));
  EXPECT_EQ(slow.health, Health::warn);
  EXPECT_THAT(slow.found, HasSubstr("4000 us"));
}

TEST(DoctorAllReduce, WhatWentWrongIsTold) {
  EXPECT_EQ(check_all_reduce(std::nullopt).health, Health::warn);
  const auto failed = check_all_reduce(CapturedProgram{
      .exit_code = 1, .err = "noise\nlockstep bench: rank 1 of 2 failed\n"});
  EXPECT_EQ(failed.health, Health::fail);
  EXPECT_EQ(
      failed.found,
      "two ranks of this host failed: lockstep bench: rank 1 of 2 failed");
  const auto late = check_all_reduce(CapturedProgram{.in_time = false});
  EXPECT_EQ(late.health, Health::fail);
  EXPECT_THAT(late.found, HasSubstr("did not end in time"));
  // Wrong results have figures and an exit code.
  auto wrong = measured(2.5);
  wrong.exit_code = 1;
  EXPECT_EQ(check_all_reduce(wrong).health, Health::fail);
  EXPECT_EQ(check_all_reduce(CapturedProgram{.out = "{}"}).health,
            Health::fail);
  EXPECT_EQ(check_all_reduce(CapturedProgram{.out = "[1]"}).health,
            Health::fail);
}

TEST(DoctorReport, AdviceIsBelowTheLineAndNoLineIsLong) {
  Finding finding{.name = "open files", .found = "200 in a process"};
  EXPECT_EQ(finding_text(finding), "ok    open files     200 in a process\n");
  finding.warn("Jobs on many hosts need more than this.");
  finding.warn("Before lockstep run, say ulimit -n 65536 in the same shell.");
  const std::string text = finding_text(finding);
  EXPECT_EQ(
      text,
      "warn  open files     200 in a process\n"
      "                     Jobs on many hosts need more than this. "
      "Before lockstep\n"
      "                     run, say ulimit -n 65536 in the same shell.\n");
  for (const auto& line : lines(text)) EXPECT_LE(line.size(), 80u);
  // A word that is longer than a line stays whole.
  finding.found = std::string(100, 'x');
  EXPECT_THAT(finding_text(finding), HasSubstr(" " + finding.found + "\n"));
}

TEST(DoctorReport, ACheckThatThrowsIsAFailureOfItsName) {
  const auto thrown = findings_of(
      "NUMA", []() -> Finding { throw std::runtime_error("no such file"); });
  ASSERT_EQ(thrown.size(), 1u);
  EXPECT_EQ(thrown[0].name, "NUMA");
  EXPECT_EQ(thrown[0].health, Health::fail);
  EXPECT_EQ(thrown[0].found, "could not be examined: no such file");
  EXPECT_NE(thrown[0].advice, "");
  const auto one =
      findings_of("clock", [] { return Finding{.name = "clock"}; });
  EXPECT_EQ(one.size(), 1u);
}

TEST(DoctorReport, TheWorstHealthCounts) {
  std::vector<Finding> findings{{.name = "a"}, {.name = "b", .found = "x\ny"}};
  EXPECT_EQ(worst_of(findings), Health::ok);
  EXPECT_EQ(summary_text(findings), "2 ok, 0 warnings, 0 failures\n");
  findings[0].fail("Mend it.");
  findings[0].warn("And this.");  // the health stays
  findings[0].values = {{"n", 3}};
  findings[1].warn("Look.");
  EXPECT_EQ(worst_of(findings), Health::fail);
  EXPECT_EQ(summary_text(findings), "0 ok, 1 warning, 1 failure\n");
  const auto document = json::parse(findings_json(findings));
  EXPECT_EQ(document["health"], "fail");
  EXPECT_EQ(document["checks"][0], (json{{"name", "a"},
                                         {"health", "fail"},
                                         {"found", ""},
                                         {"advice", "Mend it. And this."},
                                         {"values", {{"n", 3}}}}));
  EXPECT_EQ(document["checks"][1]["found"], "x y");
}

}  // namespace
}  // namespace lockstep::internal::testing

// More ranks than cores, several jobs, ranks in containers: faults 23 and 24 of
// docs/faults.md.
#include <gmock/gmock.h>
#include <signal.h>

#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class Storms : public WaysTest {};

TEST_P(Storms, OfMixedOperationsAreRightBitByBit) {
  const bool in_memory = std::string(GetParam().name) == "OneHost";
  auto& job = make_job(GetParam(), 6);
  job.start("storm",
            {"turns=" + std::to_string(in_memory ? 2000 : 300),
             "seed=" + std::to_string(seed()),
             "ordered=" + std::to_string(in_memory), "end=1", "leave=1"});
  for (int rank = 0; rank < job.size(); ++rank) {
    const auto result = job.rank(rank).finish(seconds(60));
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Storms,
                         ::testing::Values(kOneHost, kTwoHosts, kGloo),
                         way_name);

class Neighbours : public FaultsTest {
 protected:
  void expect_right(Job& job) {
    for (int rank = 0; rank < job.size(); ++rank) {
      const auto result = job.rank(rank).finish(seconds(60));
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    }
  }
  std::vector<std::string> storm(int job) const {
    return {"turns=300", "seed=" + std::to_string(seed() + job), "ordered=1",
            "end=1", "leave=1"};
  }
  // Returns whether the process maps shared memory.
  static bool shares(pid_t pid) {
    return read_file("/proc/" + std::to_string(pid) + "/maps")
               .find("/memfd:lockstep") != std::string::npos;
  }
};

TEST_F(Neighbours, AreTwoJobsOfOneUserAtOnce) {
  Job* jobs[] = {&make_job(kOneHost, 2), &make_job(kOneHost, 2)};
  for (int rank = 0; rank < 2; ++rank) {
    for (int job = 0; job < 2; ++job) {
      jobs[job]->start_rank(rank, "storm", storm(job));
    }
  }
  for (auto* job : jobs) expect_right(*job);
}

TEST_F(Neighbours, OfWhichOneIsKilledLeaveTheOtherAlone) {
  auto& dying = make_job(kOneHost, 2);
  auto& living = make_job(kOneHost, 2);
  dying.start("loop");
  living.start("loop");
  dying.await("ready");
  living.await("ready");
  for (int rank = 0; rank < 2; ++rank) dying.rank(rank).signal(SIGKILL);
  for (int rank = 0; rank < 2; ++rank) {
    const auto turn = "turn " + std::to_string(rank) + "\n";
    living.rank(rank).await_output(turn,
                                   count(living.rank(rank).out(), turn) + 5);
    EXPECT_EQ(living.said(rank, "failed"), "");
  }
}

// Ranks run as in a container: with their own process ids, mounts and System V
// memory.
class Containers : public Neighbours {
 protected:
  void SetUp() override {
    const auto tried = run_program(contained({"true"}));
    if (tried.exit_code != 0) {
      GTEST_SKIP() << "no right to make namespaces: " << tried.err;
    }
  }
  static std::vector<std::string> contained(
      const std::vector<std::string>& command) {
    std::vector<std::string> all{
        "/bin/sh", "-c",      "exec \"$0\" \"$@\"", "unshare",      "--pid",
        "--ipc",   "--mount", "--mount-proc",       "--kill-child", "--fork",
        "--"};
    all.insert(all.end(), command.begin(), command.end());
    return all;
  }
  // Puts rank 1 of 2 into a container, or each rank into one of its own.
  Job& make(bool each) {
    auto& job = make_job(kOneHost, 2);
    job.prefix = [each](int rank) {
      return each || rank == 1 ? contained({}) : std::vector<std::string>{};
    };
    return job;
  }
  // Returns the process of the rank inside the container.
  static pid_t inside(const RunningProgram& container) {
    const auto pid = std::to_string(container.pid());
    return std::stoi(read_file("/proc/" + pid + "/task/" + pid + "/children"));
  }
};

TEST_F(Containers, ShareMemory) {
  for (const bool each : {false, true}) {
    SCOPED_TRACE(each);
    auto& job = make(each);
    job.start("loop");
    job.await("ready");
    EXPECT_TRUE(shares(inside(job.rank(1))));
    auto& right = make(each);
    right.start("storm", storm(0));
    expect_right(right);
  }
}

TEST_F(Containers, TellOfADeathAcrossTheirBorders) {
  for (const int victim : {0, 1}) {
    SCOPED_TRACE(victim);
    auto& job = make(false);
    job.start("loop");
    job.await("ready");
    ::kill(victim == 0 ? job.rank(0).pid() : inside(job.rank(1)), SIGKILL);
    job.await("failed", victim, seconds(1));
    EXPECT_THAT(job.said(1 - victim, "failed"),
                HasSubstr("rank " + std::to_string(victim) + " died"));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing

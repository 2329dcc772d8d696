// Runs the tutorial's last program: 16 ranks, under one agent or two, and
// through a crash.

#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <iterator>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/process/store_port.h"
#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::IsEmpty;

constexpr int kRanks = 16;

// Returns what all ranks print in the epochs [first, end).
std::vector<std::string> epoch_lines(int first, int end, int save_every) {
  std::vector<std::string> all;
  for (int epoch = first; epoch < end; ++epoch) {
    const std::string number = std::to_string(epoch);
    for (int rank = 0; rank < kRanks; ++rank) {
      all.push_back("[CPU" + std::to_string(rank) + "] Epoch " + number +
                    " | Batchsize: 32 | Steps: 4");
    }
    if (epoch % save_every == 0) {
      all.push_back("Epoch " + number +
                    " | Training snapshot saved at snapshot.pt");
    }
  }
  return all;
}

class MultinodeTest : public ExampleTest {
 protected:
  // Starts two agents that meet at a port of this host, as if each were on a
  // host of its own.
  std::vector<std::unique_ptr<RunningProgram>> start_agents(
      int max_restarts, const std::vector<std::string>& arguments) {
    std::vector<std::unique_ptr<RunningProgram>> agents;
    for (int node : {0, 1}) {
      agents.push_back(start_example(
          {LOCKSTEP_BIN_DIR "/lockstep", "run", "--nnodes=2",
           "--node-rank=" + std::to_string(node), "--rdzv-id=456",
           "--rdzv-backend=c10d",
           "--rdzv-endpoint=[::1]:" + std::to_string(port_.port()),
           "--nproc_per_node=8",
           "--max-restarts=" + std::to_string(max_restarts)},
          arguments));
    }
    return agents;
  }
  // The test looks up the process early, so that it can kill it at the right
  // moment without a search.
  pid_t process_of(int rank) {
    const Deadline deadline = Deadline::after(kAllowed);
    while (!deadline.expired()) {
      auto found = marked_processes({"RANK=" + std::to_string(rank)});
      if (found.size() == 1) return found[0];
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    ADD_FAILURE() << "rank " << rank << " was not started";
    return 0;
  }

 private:
  StorePort port_ = StorePort::hold("::1", 0);  // reserved for this test
};

TEST_F(MultinodeTest, SixteenRanksUnderOneAgent) {
  auto result = run_ranks({kRanks}, {"multinode", "10", "2"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, IsEmpty());
  EXPECT_THAT(lines(result.out),
              ::testing::UnorderedElementsAreArray(epoch_lines(0, 10, 2)));
}

TEST_F(MultinodeTest, SixteenRanksUnderTwoAgents) {
  std::vector<std::string> printed;
  for (auto& agent : start_agents(0, {"multinode", "10", "2"})) {
    auto result = agent->finish(kAllowed);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.err, IsEmpty());
    std::ranges::copy(lines(result.out), std::back_inserter(printed));
  }
  EXPECT_THAT(printed,
              ::testing::UnorderedElementsAreArray(epoch_lines(0, 10, 2)));
}

TEST_F(MultinodeTest, ResumedEqualsUninterrupted) {
  auto run = [&](const char* epochs, const char* snapshot) {
    auto result = run_ranks(
        {2}, {"multinode", epochs, "1", "--loss=mse", "--snapshot", snapshot});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return read_file(scratch() / snapshot);
  };
  const std::string whole = run("4", "whole.pt");
  EXPECT_FALSE(run("2", "parts.pt") == whole);
  EXPECT_TRUE(run("4", "parts.pt") == whole);
}

TEST_F(MultinodeTest, CrashedRankIsStartedAgainFromTheSnapshot) {
  auto whole = run_ranks(
      {kRanks}, {"multinode", "15", "2", "--loss=mse", "--snapshot=whole.pt"});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;

  auto agents = start_agents(1, {"multinode", "15", "2", "--loss=mse"});
  const pid_t victim = process_of(13);  // a rank of the second agent
  ASSERT_GT(victim, 0);
  agents[0]->await_output("Epoch 2 | Training snapshot saved", 1, kAllowed);
  ASSERT_EQ(::kill(victim, SIGKILL), 0);
  std::string printed;
  for (auto& agent : agents) {
    auto result = agent->finish(kAllowed);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    printed += result.out;
  }
  EXPECT_EQ(count(printed, "Loading snapshot\n"), kRanks);
  EXPECT_EQ(count(printed, "Resuming training from snapshot at Epoch "),
            kRanks);
  EXPECT_TRUE(read_file(scratch() / "snapshot.pt") ==
              read_file(scratch() / "whole.pt"));
}

}  // namespace
}  // namespace lockstep::internal::testing

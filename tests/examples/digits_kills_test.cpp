// Kills ranks of one training at random moments, on one node and on two.
// Restarts, from standby processes and without, end with the parameters of the
// run without kills, bit for bit.

#include <gmock/gmock.h>
#include <signal.h>
#include <torch/torch.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/launch/process/store_port.h"
#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr const char* kLauncher = LOCKSTEP_BIN_DIR "/lockstep";
constexpr int kRanks = 2;

// The parameter is the number of nodes, each an agent on this host.
class DigitsKills : public ExampleTest,
                    public ::testing::WithParamInterface<int> {
 protected:
  void start_agents(int kills, const std::vector<std::string>& program) {
    const std::string ranks = std::to_string(kRanks / GetParam());
    for (int node = 0; node < GetParam(); ++node) {
      std::vector<std::string> launcher{
          kLauncher,
          "run",
          "--nproc-per-node=" + ranks,
          "--standby=" + ranks,
          "--max-restarts=" + std::to_string(kills),
          "--report=" + report_of(node)};
      if (GetParam() > 1) {
        launcher.insert(
            launcher.end(),
            {"--nnodes=" + std::to_string(GetParam()), "--rdzv-insecure",
             "--node-rank=" + std::to_string(node),
             "--rdzv-endpoint=[::1]:" + std::to_string(port_.port())});
      }
      agents_.push_back(start_example(launcher, program));
    }
  }
  std::string report_of(int node) const {
    return path("report" + std::to_string(node) + ".json");
  }
  std::string path(const std::string& name) const {
    return (scratch() / name).string();
  }
  std::vector<std::string> training(const std::string& snapshot, int epochs) {
    return {"digits", "--epochs",   std::to_string(epochs), "--save-every",
            "2",      "--snapshot", path(snapshot)};
  }
  json status(int node) {
    const auto result = run_program(
        {kLauncher, "status", "--json",
         std::to_string(agents_[static_cast<size_t>(node)]->pid())});
    return json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  }
  // Returns the workers of attempt `restart` by rank. Returns nothing if it
  // does not run on all nodes, or if standby processes are wanted that do not
  // wait yet.
  std::vector<pid_t> workers_of(int restart, bool from_standby) {
    std::vector<pid_t> workers;
    for (int node = 0; node < GetParam(); ++node) {
      const json now = status(node);
      if (!now.is_object() || now["restart"] != restart ||
          now["state"] != "running" ||
          (from_standby && now["standby"] != kRanks / GetParam())) {
        return {};
      }
      for (const json& worker : now["workers"]) {
        workers.push_back(worker["pid"]);
      }
    }
    return workers.size() == kRanks ? workers : std::vector<pid_t>();
  }
  // Waits until attempt `restart` has standby processes, if they are wanted,
  // and has saved something new. Returns the worker to kill, or 0 if the
  // training does not come that far.
  pid_t await_victim(int restart, bool from_standby, int rank) {
    const std::string before = read_file(path("killed.safetensors"));
    const Deadline deadline = Deadline::after(seconds(60));
    while (!deadline.expired()) {
      const auto workers = workers_of(restart, from_standby);
      if (!workers.empty() &&
          std::filesystem::exists(path("killed.safetensors")) &&
          read_file(path("killed.safetensors")) != before) {
        return workers[static_cast<size_t>(rank)];
      }
      std::this_thread::sleep_for(milliseconds(50));
    }
    return 0;
  }

  std::vector<std::unique_ptr<RunningProgram>> agents_;

 private:
  StorePort port_ = StorePort::hold("::1", 0);  // reserved for this test
};

TEST_P(DigitsKills, EndWithTheBitsOfTheRunWithoutKills) {
  const auto kills =
      static_cast<int>(get_env_int("LOCKSTEP_TEST_KILLS", 1, 1000).value_or(2));
  const int epochs = 10 + 20 * kills;
  const seconds allowed(240 + 60 * kills);
  const unsigned seed =
      static_cast<unsigned>(get_env_int("LOCKSTEP_TEST_SEED", 0, 1 << 30)
                                .value_or(std::random_device{}() % (1 << 30)));
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::minstd_rand random(seed);

  auto whole = start_ranks({kRanks}, training("whole.safetensors", epochs));
  const auto result = whole->finish(allowed);
  ASSERT_EQ(result.exit_code, 0) << result.err;

  start_agents(kills, training("killed.safetensors", epochs));
  for (int kill = 0; kill < kills; ++kill) {
    const int rank = static_cast<int>(random() % kRanks);
    const pid_t victim = await_victim(kill, kill % 3 == 0, rank);
    ASSERT_NE(victim, 0) << "kill " << kill << ": " << agents_[0]->err();
    std::this_thread::sleep_for(milliseconds(random() % 100));
    ASSERT_EQ(::kill(victim, SIGKILL), 0)
        << "the training ended before kill " << kill;
  }
  for (int node = 0; node < GetParam(); ++node) {
    const auto killed = agents_[static_cast<size_t>(node)]->finish(allowed);
    ASSERT_EQ(killed.exit_code, 0) << killed.err;
    const json report = json::parse(read_file(report_of(node)));
    EXPECT_EQ(report["restarts_used"], kills);
    EXPECT_GE(count(killed.err, "with " + std::to_string(kRanks / GetParam()) +
                                    " from standby"),
              (kills + 2) / 3)
        << killed.err;
  }

  const Snapshot one = load_snapshot_file(path("whole.safetensors"));
  const Snapshot other = load_snapshot_file(path("killed.safetensors"));
  ASSERT_EQ(one.model_state.size(), other.model_state.size());
  for (size_t i = 0; i < one.model_state.size(); ++i) {
    EXPECT_TRUE(one.model_state[i].second.equal(other.model_state[i].second))
        << one.model_state[i].first;
  }
  EXPECT_EQ(one.step, other.step);
}

INSTANTIATE_TEST_SUITE_P(Nodes, DigitsKills, ::testing::Values(1, 2));

}  // namespace
}  // namespace lockstep::internal::testing

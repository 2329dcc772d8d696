// Kills ranks of one training at random moments. Restarts, from standby
// processes and without, end with the parameters of the run without kills, bit
// for bit.

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
#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr const char* kLauncher = LOCKSTEP_BIN_DIR "/lockstep";
constexpr const char* kJob = "digits-kills";

class DigitsKills : public ExampleTest {
 protected:
  std::string path(const std::string& name) const {
    return (scratch() / name).string();
  }
  std::vector<std::string> training(const std::string& snapshot, int epochs) {
    return {"digits", "--epochs",   std::to_string(epochs), "--save-every",
            "2",      "--snapshot", path(snapshot)};
  }
  json status() {
    const auto result = run_program({kLauncher, "status", "--json", kJob});
    return json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  }
  // Waits until attempt `restart` has standby processes, if they are wanted,
  // and has saved something new. Returns the worker to kill, or 0 if the
  // training does not come that far.
  pid_t await_victim(int restart, bool from_standby, int rank) {
    const std::string before = read_file(path("killed.safetensors"));
    const Deadline deadline = Deadline::after(seconds(60));
    while (!deadline.expired()) {
      const json now = status();
      if (!now.is_object()) {  // it has not begun, or has ended
        if (restart > 0) break;
        continue;
      }
      if (now["restart"] == restart && now["state"] == "running" &&
          now["workers"].size() == 2 &&
          (!from_standby || now["standby"] == 2) &&
          std::filesystem::exists(path("killed.safetensors")) &&
          read_file(path("killed.safetensors")) != before) {
        return now["workers"][static_cast<size_t>(rank)]["pid"];
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    return 0;
  }
};

TEST_F(DigitsKills, EndWithTheBitsOfTheRunWithoutKills) {
  const auto kills =
      static_cast<int>(get_env_int("LOCKSTEP_TEST_KILLS", 1, 1000).value_or(3));
  const int epochs = 20 + 25 * kills;
  const seconds allowed(60 + 20 * kills);
  const unsigned seed =
      static_cast<unsigned>(get_env_int("LOCKSTEP_TEST_SEED", 0, 1 << 30)
                                .value_or(std::random_device{}() % (1 << 30)));
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::minstd_rand random(seed);

  auto whole = start_ranks({2}, training("whole.safetensors", epochs));
  const auto result = whole->finish(allowed);
  ASSERT_EQ(result.exit_code, 0) << result.err;

  auto job = start_example(
      {kLauncher, "run", std::string("--rdzv-id=") + kJob, "--nproc-per-node=2",
       "--max-restarts=" + std::to_string(kills), "--standby=2",
       "--report=" + path("report.json")},
      training("killed.safetensors", epochs));
  for (int kill = 0; kill < kills; ++kill) {
    const int rank = static_cast<int>(random() % 2);
    const pid_t victim = await_victim(kill, kill % 3 == 0, rank);
    ASSERT_NE(victim, 0) << "kill " << kill << ": " << job->err();
    std::this_thread::sleep_for(milliseconds(random() % 100));
    ASSERT_EQ(::kill(victim, SIGKILL), 0)
        << "the training ended before kill " << kill;
  }
  const auto killed = job->finish(allowed);
  ASSERT_EQ(killed.exit_code, 0) << killed.err;
  const json report = json::parse(read_file(path("report.json")));
  EXPECT_EQ(report["restarts_used"], kills);
  EXPECT_GE(count(killed.err, "with 2 from standby"), (kills + 2) / 3)
      << killed.err;

  const Snapshot one = load_snapshot_file(path("whole.safetensors"));
  const Snapshot other = load_snapshot_file(path("killed.safetensors"));
  ASSERT_EQ(one.model_state.size(), other.model_state.size());
  for (size_t i = 0; i < one.model_state.size(); ++i) {
    EXPECT_TRUE(one.model_state[i].second.equal(other.model_state[i].second))
        << one.model_state[i].first;
  }
  EXPECT_EQ(one.step, other.step);
}

}  // namespace
}  // namespace lockstep::internal::testing

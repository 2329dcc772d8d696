// Random faults, many in a row: no process outlives its launcher, and no job
// hangs. The default run has a few; the slow test has 200 kills on one node and
// 60 faults on two (LOCKSTEP_TEST_SOAK). LOCKSTEP_TEST_SEED repeats a run.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/environment.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A worker with a child in its process group and one in a session of its own.
const std::string kFamily =
    "sleep 300 & setsid sleep 300 & echo agent $PPID; wait";

class Soak : public NodesTest {
 protected:
  Soak() : random_(seed_) {}

  static int kills() {
    return static_cast<int>(
        get_env_int("LOCKSTEP_TEST_SOAK", 1, 100'000).value_or(10));
  }
  static int faults() { return (3 * kills() + 9) / 10; }

  unsigned below(unsigned end) {
    return static_cast<unsigned>(random_() % end);
  }
  void pause(unsigned most_ms) {
    std::this_thread::sleep_for(milliseconds(below(most_ms)));
  }
  // Kills a process that the workers have started, or a worker. There may be
  // none yet, or none any more.
  void kill_below(const RunningProgram& launcher) {
    auto all = marked_processes({"LOCAL_RANK=0"});
    std::erase(all, launcher.pid());
    if (!all.empty()) {
      ::kill(all[below(static_cast<unsigned>(all.size()))], SIGKILL);
    }
  }
  // A launcher that is killed before its agent has started leaves its temporary
  // directory to the next launch.
  void remove_what_the_killed_left() {
    // A launcher that is killed before it has marked its directory leaves it
    // for a day.
    const auto yesterday =
        std::filesystem::file_time_type::clock::now() - std::chrono::hours(25);
    for (const auto& one :
         std::filesystem::directory_iterator(scratch().parent_path() / "tmp")) {
      std::filesystem::last_write_time(one.path(), yesterday);
    }
    EXPECT_EQ(run_script({}, "true").exit_code, 0);
  }

  const unsigned seed_ =
      static_cast<unsigned>(get_env_int("LOCKSTEP_TEST_SEED", 0, 1 << 30)
                                .value_or(std::random_device{}() % (1 << 30)));

 private:
  std::minstd_rand random_;
};

TEST_F(Soak, RandomKillsOnOneNodeLeaveNoProcess) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  for (int number = 0; number < kills(); ++number) {
    const unsigned kind = below(3);
    SCOPED_TRACE("kill " + std::to_string(number) + " of kind " +
                 std::to_string(kind));
    auto launcher =
        start_script({"--nproc-per-node=2", "--max-restarts=1"}, kFamily);
    // Sometimes while the job starts.
    if (kind == 1 || below(2) == 0) launcher->await_output("agent ");
    pause(60);
    if (kind == 0) {
      launcher->signal(SIGKILL);
    } else if (kind == 1) {
      ::kill(agent_of(*launcher), SIGKILL);
    } else {
      kill_below(*launcher);
      pause(200);
      launcher->signal(SIGTERM);
    }
    launcher->finish(seconds(60));
    ASSERT_TRUE(await_no_process(seconds(60))) << launcher->err();
  }
  remove_what_the_killed_left();
}

TEST_F(Soak, RandomFaultsOnTwoNodesLeaveNoHang) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  for (int number = 0; number < faults(); ++number) {
    const unsigned kind = below(5);
    SCOPED_TRACE("fault " + std::to_string(number) + " of kind " +
                 std::to_string(kind));
    const std::string endpoint = "[::1]:" + std::to_string(free_port());
    std::vector<std::unique_ptr<RunningProgram>> nodes;
    for (int rank = 0; rank < 2; ++rank) {
      // A node that is lost is not replaced.
      nodes.push_back(
          start_script(with(meeting(endpoint, 2, rank),
                            {"--max-restarts=1", "--rdzv-conf=join_timeout=5"}),
                       "echo agent $PPID; exec sleep 2"));
    }
    auto& victim = *nodes[below(2)];
    if (kind == 1 || kind == 3 || below(2) == 0) victim.await_output("agent ");
    pause(500);
    if (kind == 0) {
      victim.signal(SIGKILL);
    } else if (kind == 1) {
      ::kill(agent_of(victim), SIGKILL);
    } else if (kind == 2) {
      kill_below(victim);
    } else if (kind == 3) {
      ::kill(agent_of(victim), SIGSTOP);
      pause(4000);
      ::kill(agent_of(victim), SIGCONT);
    } else {
      victim.signal(SIGTERM);
    }
    for (auto& node : nodes) node->finish(seconds(60));
    ASSERT_TRUE(await_no_process(seconds(60)))
        << nodes[0]->err() << nodes[1]->err();
  }
  remove_what_the_killed_left();
}

}  // namespace
}  // namespace lockstep::internal::testing

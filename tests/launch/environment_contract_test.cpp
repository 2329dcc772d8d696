// The variables that torchrun promises to a worker, after PyTorch 2.13's list.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "lockstep/launch/agent/worker_environment.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

std::map<std::string, std::string> as_map(const std::string& text) {
  std::map<std::string, std::string> variables;
  for (const auto& line : lines(text)) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) {
      variables[line.substr(0, equals)] = line.substr(equals + 1);
    }
  }
  return variables;
}

class EnvironmentContract : public LauncherTest {};

TEST_F(EnvironmentContract, HasEveryVariableOfTorchrun) {
  const auto result =
      run_script({"--nproc-per-node=2", "--max-restarts=3", "--role=trainer",
                  "--rdzv-id=job7"},
                 "[ $RANK = 0 ] || { sleep 0.2; echo ==; }; env");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const size_t middle = result.out.find("==\n");
  const auto first = as_map(result.out.substr(0, middle));
  const auto second = as_map(result.out.substr(middle));

  const std::map<std::string, std::string> expected{
      {"RANK", "1"},
      {"LOCAL_RANK", "1"},
      {"ROLE_RANK", "1"},
      {"GROUP_RANK", "0"},
      {"ROLE_NAME", "trainer"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"WORLD_SIZE", "2"},
      {"ROLE_WORLD_SIZE", "2"},
      {"GROUP_WORLD_SIZE", "1"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "3"},
      {"TORCHELASTIC_RUN_ID", "job7"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"OMP_NUM_THREADS", "1"},
  };
  EXPECT_THAT(second, IsSupersetOf(expected));
  EXPECT_EQ(first.at("RANK"), "0");
  EXPECT_EQ(first.at("MASTER_PORT"), second.at("MASTER_PORT"));
  EXPECT_NE(first.at("TORCHELASTIC_ERROR_FILE"),
            second.at("TORCHELASTIC_ERROR_FILE"));
  EXPECT_EQ(first.count("LOCKSTEP_MASTER_LISTEN_FD"), 1u);
  EXPECT_EQ(second.count("LOCKSTEP_MASTER_LISTEN_FD"), 0u);
}

TEST_F(EnvironmentContract, OmpThreadsAreLimitedOnceAndOnlyWhereUnset) {
  const std::string notice = "OMP_NUM_THREADS";
  auto result =
      run_script({"--nproc-per-node=2", "--max-restarts=1"}, "exit 1");
  EXPECT_EQ(count(result.err, notice + " is not set"), 1) << result.err;

  result = run_script({"--nproc-per-node=2"}, "echo $OMP_NUM_THREADS",
                      {.environment = {"OMP_NUM_THREADS=5"}});
  EXPECT_EQ(result.out, "5\n5\n");
  EXPECT_EQ(result.err, "");

  result = run_script({}, "echo ${OMP_NUM_THREADS-unset}");
  EXPECT_EQ(result.out, "unset\n");
  EXPECT_EQ(result.err, "");
}

TEST_F(EnvironmentContract, LargeTensorsHaveHugePagesInAJobThatHeals) {
  const auto asks = [](bool heals, const std::vector<std::string>& inherited) {
    WorkerIdentity worker;
    worker.heals = heals;
    const auto entries = worker_environment(worker, inherited);
    return std::ranges::count(entries, "THP_MEM_ALLOC_ENABLE=1") == 1;
  };
  EXPECT_TRUE(asks(true, {}));
  EXPECT_FALSE(asks(true, {"THP_MEM_ALLOC_ENABLE=0"}));
  EXPECT_FALSE(asks(false, {}));
}

TEST_F(EnvironmentContract, MasterSocketIsInheritedByLocalRankZeroOnly) {
  const auto result = run_script(
      {"--nproc-per-node=2"},
      "for fd in /proc/self/fd/*; do case $(readlink $fd) in socket:*) "
      "echo $RANK ${fd##*/};; esac; done; "
      "[ $RANK != 0 ] || echo named $LOCKSTEP_MASTER_LISTEN_FD");
  const auto found = lines(result.out);
  ASSERT_EQ(found.size(), 2u) << result.out;
  EXPECT_EQ(found[0].substr(2), found[1].substr(6));
  EXPECT_EQ(found[0].front(), '0');
}

TEST_F(EnvironmentContract, DescriptorsOfTheCallerAreNotTheWorkers) {
  const auto result = run_program(
      {"/bin/sh", "-c",
       "exec 7</etc/passwd 8>/dev/null; exec " LOCKSTEP_BIN_DIR
       "/lockstep run sh -c 'for fd in 7 8; do [ -e /proc/$$/fd/$fd ] && "
       "echo leaked $fd; done; echo looked'"});
  EXPECT_EQ(result.out, "looked\n");
}

// Each worker with prefixed lines costs the launcher two descriptors.
TEST_F(EnvironmentContract, SoftLimitOfDescriptorsIsTheWorkersAlone) {
  const auto result =
      run_program({"/bin/sh", "-c",
                   "ulimit -S -n 64; exec " LOCKSTEP_BIN_DIR
                   "/lockstep run --nproc-per-node=60 --prefix-lines sh -c "
                   "'ulimit -S -n'"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "]:64\n"), 60);
}

TEST_F(EnvironmentContract, NestedLauncherDropsTheOuterDescriptor) {
  const auto environment =
      worker_environment({.local_rank = 1, .local_world_size = 2},
                         {"LOCKSTEP_MASTER_LISTEN_FD=9", "LOCKSTEP_STORE=outer",
                          "RANK=7", "RANKED=yes"});
  EXPECT_THAT(environment, ::testing::Contains("RANK=1"));
  EXPECT_THAT(environment, ::testing::Contains("RANKED=yes"));
  EXPECT_THAT(environment, ::testing::Not(::testing::Contains("RANK=7")));
  EXPECT_THAT(environment, ::testing::Not(::testing::Contains(
                               HasSubstr("LOCKSTEP_MASTER_LISTEN_FD"))));
  EXPECT_THAT(environment,
              ::testing::Not(::testing::Contains(HasSubstr("LOCKSTEP_STORE"))));
}

}  // namespace
}  // namespace lockstep::internal::testing

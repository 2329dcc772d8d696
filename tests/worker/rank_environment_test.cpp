#include "lockstep/worker/rank_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/harness/message_of.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

// The environment of a task, and nothing else that says a place.
class Task {
 public:
  explicit Task(std::map<std::string, std::string> variables) {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "SLURM_STEP_ID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_PROCID",
                             "SLURM_LOCALID",
                             "SLURM_NODEID",
                             "SLURM_NTASKS",
                             "SLURM_STEP_TASKS_PER_NODE",
                             "SLURM_STEP_NODELIST",
                             "SLURM_JOB_ID",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMIX_NAMESPACE",
                             "PMI_SIZE",
                             "PMI_RANK",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS"}) {
      if (const char* value = std::getenv(name)) before_[name] = value;
      if (variables.contains(name)) {
        setenv(name, variables[name].c_str(), 1);
      } else {
        unsetenv(name);
      }
      names_.push_back(name);
    }
  }
  ~Task() {
    for (const auto& name : names_) {
      if (before_.contains(name)) {
        setenv(name.c_str(), before_[name].c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

 private:
  std::vector<std::string> names_;
  std::map<std::string, std::string> before_;
};

std::map<std::string, std::string> slurm() {
  return {{"SLURM_JOB_ID", "17"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_STEP_NUM_TASKS", "7"},
          {"SLURM_NTASKS", "8"},
          {"SLURM_PROCID", "6"},
          {"SLURM_LOCALID", "0"},
          {"SLURM_NODEID", "3"},
          {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
          {"SLURM_STEP_NODELIST", "rack2-[09-11,14],login"}};
}

TEST(RankEnvironment, IsThatOfTheLauncher) {
  auto variables = slurm();
  variables.insert({{"RANK", "1"},
                    {"WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "node0"},
                    {"MASTER_PORT", "29500"}});
  const Task task(variables);
  EXPECT_EQ(get_rank_env("RANK"), "1");
  EXPECT_EQ(get_rank_env("WORLD_SIZE"), "2");
  EXPECT_EQ(get_rank_env("MASTER_ADDR"), "node0");
  EXPECT_EQ(get_rank_env("MASTER_PORT"), "29500");
  // The launcher did not set it, and the task's would be another process's.
  EXPECT_EQ(get_rank_env("LOCAL_RANK"), std::nullopt);
  EXPECT_EQ(scheduler_of_ranks(), std::nullopt);
}

TEST(RankEnvironment, IsThatOfSlurmsStep) {
  const Task task(slurm());
  EXPECT_EQ(scheduler_of_ranks(), "srun");
  EXPECT_EQ(get_rank_env_int("RANK", 0, 100), 6);
  EXPECT_EQ(get_rank_env_int("WORLD_SIZE", 1, 100), 7);
  EXPECT_EQ(get_rank_env_int("LOCAL_RANK", 0, 100), 0);
  EXPECT_EQ(get_rank_env_int("LOCAL_WORLD_SIZE", 1, 100), 1);
  EXPECT_EQ(get_rank_env("MASTER_ADDR"), "rack2-09");
  const auto port = get_rank_env_int("MASTER_PORT", 20000, 29999);
  auto variables = slurm();
  variables["SLURM_PROCID"] = "0";
  variables["SLURM_NODEID"] = "2";
  const Task other(variables);
  EXPECT_EQ(get_rank_env_int("MASTER_PORT", 20000, 29999), port);
  EXPECT_EQ(get_rank_env("LOCAL_WORLD_SIZE"), "2");
}

TEST(RankEnvironment, WhatTheUserSetsComesFirst) {
  auto variables = slurm();
  variables["MASTER_ADDR"] = "10.0.0.1";
  variables["RANK"] = "6";
  const Task task(variables);
  EXPECT_EQ(get_rank_env("MASTER_ADDR"), "10.0.0.1");
  EXPECT_EQ(get_rank_env("WORLD_SIZE"), "7");
}

TEST(RankEnvironment, OneHostNeedsNoName) {
  auto variables = slurm();
  variables["SLURM_STEP_TASKS_PER_NODE"] = "7";
  variables["SLURM_NODEID"] = "0";
  EXPECT_EQ((Task(variables), get_rank_env("MASTER_ADDR")), "127.0.0.1");
}

TEST(RankEnvironment, ABatchScriptOfSlurmIsNoTask) {
  auto variables = slurm();
  variables.erase("SLURM_STEP_ID");
  const Task task(variables);
  EXPECT_EQ(get_rank_env("RANK"), std::nullopt);
  EXPECT_EQ(scheduler_of_ranks(), std::nullopt);
}

TEST(RankEnvironment, OneTaskIsAProcessAlone) {
  auto variables = slurm();
  variables["SLURM_STEP_NUM_TASKS"] = "1";
  variables["SLURM_PROCID"] = "0";
  const Task task(variables);
  EXPECT_EQ(get_rank_env("WORLD_SIZE"), std::nullopt);
}

TEST(RankEnvironment, IsThatOfMpirun) {
  std::map<std::string, std::string> variables{
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_RANK", "3"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
      {"PMIX_NAMESPACE", "1234"}};
  std::optional<std::string> port;
  {
    const Task task(variables);
    EXPECT_EQ(scheduler_of_ranks(), "mpirun");
    EXPECT_EQ(get_rank_env("RANK"), "3");
    EXPECT_EQ(get_rank_env("LOCAL_RANK"), "1");
    EXPECT_EQ(get_rank_env("MASTER_ADDR"), "127.0.0.1");
    port = get_rank_env("MASTER_PORT");
  }
  variables["PMIX_NAMESPACE"] = "1235";
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  const Task on_two_hosts(variables);
  EXPECT_NE(get_rank_env("MASTER_PORT"), port);
  EXPECT_EQ(get_rank_env("MASTER_ADDR"), std::nullopt);
}

TEST(RankEnvironment, IsThatOfMpich) {
  const Task task({{"PMI_SIZE", "2"},
                   {"PMI_RANK", "1"},
                   {"MPI_LOCALRANKID", "1"},
                   {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(scheduler_of_ranks(), "mpiexec");
  EXPECT_EQ(get_rank_env("RANK"), "1");
  EXPECT_EQ(get_rank_env("LOCAL_RANK"), "1");
  EXPECT_EQ(get_rank_env("MASTER_ADDR"), "127.0.0.1");
}

TEST(RankEnvironment, WrongValuesNameTheVariable) {
  auto variables = slurm();
  variables["SLURM_PROCID"] = "x";
  {
    const Task task(variables);
    EXPECT_THAT(message_of([] { get_rank_env("RANK"); }),
                AllOf(HasSubstr("SLURM_PROCID"), HasSubstr("\"x\"")));
  }
  variables = slurm();
  variables["SLURM_STEP_TASKS_PER_NODE"] = "2(x";
  const Task task(variables);
  EXPECT_THAT(message_of([] { get_rank_env("RANK"); }),
              HasSubstr("SLURM_STEP_TASKS_PER_NODE"));
}

}  // namespace
}  // namespace lockstep::internal

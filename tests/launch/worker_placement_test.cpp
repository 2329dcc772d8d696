// Which CPUs, how many threads and which GPU workers get from `lockstep run`.
#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "lockstep/base/control_groups.h"
#include "lockstep/base/system_file.h"
#include "lockstep/launch/process/cpu_topology.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

// A worker's CPUs and its OMP_NUM_THREADS.
struct Place {
  std::set<int> cpus;
  std::string threads;
};

class WorkerPlacement : public LauncherTest {
 protected:
  // Returns the workers' places by rank.
  std::vector<Place> places(const std::vector<std::string>& options,
                            const ProgramSetup& setup = {}) {
    const auto result = run_script(
        options,
        "echo $RANK $(grep Cpus_allowed_list /proc/self/status | cut -f2) "
        "${OMP_NUM_THREADS-unset}",
        setup);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    auto all = lines(result.out);
    std::ranges::sort(all);
    std::vector<Place> found;
    for (const auto& line : all) {
      const size_t first = line.find(' ');
      const size_t second = line.find(' ', first + 1);
      const auto cpus = numbers_of(line.substr(first + 1, second - first - 1));
      found.push_back({{cpus.begin(), cpus.end()}, line.substr(second + 1)});
    }
    return found;
  }

  static size_t cores(const std::set<int>& cpus) {
    std::set<int> distinct;
    for (const Cpu& cpu : read_cpu_topology(cpus)) distinct.insert(cpu.core);
    return distinct.size();
  }
};

TEST_F(WorkerPlacement, ExclusiveCoresAreDividedAndThreadsFollowThem) {
  if (cores(allowed_cpus()) < 2) GTEST_SKIP() << "this host has one core";
  const auto found = places(
      {"--nproc-per-node=2", "--numa-binding=exclusive", "--omp-threads=auto"},
      {.environment = {"CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=77"}});
  ASSERT_EQ(found.size(), 2u);
  std::set<int> all;
  for (const Place& place : found) {
    ASSERT_FALSE(place.cpus.empty());
    auto threads = static_cast<int>(cores(place.cpus));
    if (const auto granted = granted_cores()) {
      threads = std::max(std::min(threads, static_cast<int>(*granted / 2)), 1);
    }
    EXPECT_EQ(place.threads, std::to_string(threads));
    for (const int cpu : place.cpus) {
      EXPECT_TRUE(all.insert(cpu).second) << cpu;
      EXPECT_TRUE(allowed_cpus().contains(cpu)) << cpu;
    }
  }
}

TEST_F(WorkerPlacement, WithoutTheOptionsWorkersMayRunOnEveryCpu) {
  const auto found = places({"--nproc-per-node=2", "--omp-threads=3"});
  ASSERT_EQ(found.size(), 2u);
  for (const Place& place : found) {
    EXPECT_EQ(place.cpus, allowed_cpus());
    EXPECT_EQ(place.threads, "3");
  }
}

TEST_F(WorkerPlacement, CoresOfAnExclusiveShareMustSuffice) {
  const auto cpus = std::to_string(allowed_cpus().size() + 1);
  const auto result =
      run({"--nproc-per-node=" + cpus, "--numa-binding=exclusive", "true"},
          {.environment = {"CUDA_VISIBLE_DEVICES="}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("--numa-binding: exclusive"));
}

TEST_F(WorkerPlacement, VirtualLocalRankShowsEachWorkerOneGpu) {
  const auto shown = [&](const std::vector<std::string>& environment) {
    auto result = run_script(
        {"--nproc-per-node=2", "--virtual-local-rank", "--omp-threads=1"},
        "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES. $LOCKSTEP_AGENT_PLACE "
        "$1",
        {.environment = environment});
    EXPECT_EQ(result.err, "");
    auto all = lines(result.out);
    std::ranges::sort(all);
    return all;
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(shown({}), (Lines{"0 0 0. 0", "1 0 1. 1"}));
  EXPECT_EQ(shown({"CUDA_VISIBLE_DEVICES=5, GPU-3,1"}),
            (Lines{"0 0 5. 0", "1 0 GPU-3. 1"}));
  EXPECT_EQ(shown({"CUDA_VISIBLE_DEVICES="}), (Lines{"0 0 . 0", "1 0 . 1"}));
  EXPECT_EQ(shown({"CUDA_VISIBLE_DEVICES=-1"}), (Lines{"0 0 . 0", "1 0 . 1"}));
  for (const char* list : {"0", "0,", "0,,1", "0,x"}) {
    const auto result =
        run({"--nproc-per-node=2", "--virtual-local-rank", "true"},
            {.environment = {std::string("CUDA_VISIBLE_DEVICES=") + list}});
    EXPECT_EQ(result.exit_code, 2) << list;
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err, HasSubstr("and names 1, and there are 2 workers"));
  }
  // A worker that is itself a launcher has workers with places of its own.
  const auto inner =
      run({"--virtual-local-rank", LOCKSTEP_BIN_DIR "/lockstep", "run", "sh",
           "-c", "echo ${LOCKSTEP_AGENT_PLACE-none}"});
  EXPECT_EQ(inner.out, "none\n") << inner.err;
}

}  // namespace
}  // namespace lockstep::internal::testing

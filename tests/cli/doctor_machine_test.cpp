// Tests what `lockstep doctor` says of cores, memory, limits and the clock.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include "lockstep/cli/doctor/host_checks.h"
#include "tests/cli/fake_machine.h"
#include "tests/cli/lowered_limit.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class DoctorCores : public FakeMachine {
 protected:
  DoctorCores() {
    write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-2,5\n");
    write("sys/devices/system/cpu/online", "0-7\n");
    write("proc/loadavg", "0.50 0.1 0.1 1/100 4711\n");
  }
};

TEST_F(DoctorCores, AffinityAndLoadAreTold) {
  const auto finding = check_cores(roots());
  EXPECT_EQ(finding.health, Health::ok);
  EXPECT_EQ(finding.found, "4 of the host's 8 may be used; load 0.5");
  EXPECT_EQ(finding.advice, "");
  EXPECT_EQ(finding.values["usable"], 4);
  EXPECT_EQ(finding.values["online"], 8);
  EXPECT_TRUE(finding.values["granted"].is_null());
}

TEST_F(DoctorCores, AQuotaBelowTheCoresIsAWarning) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  const auto finding = check_cores(roots());
  EXPECT_EQ(finding.health, Health::warn);
  EXPECT_THAT(finding.found, HasSubstr("for the time of 1.5"));
  EXPECT_THAT(finding.advice, HasSubstr("--nproc-per-node=cpu"));
  EXPECT_EQ(finding.values["granted"], 1.5);
  // A quota that covers the cores takes nothing away.
  write("sys/fs/cgroup/job/cpu.max", "400000 100000\n");
  EXPECT_EQ(check_cores(roots()).health, Health::ok);
}

TEST_F(DoctorCores, MoreLoadThanCoresIsAWarning) {
  write("proc/loadavg", "8.01 0.1 0.1 9/100 4711\n");
  const auto finding = check_cores(roots());
  EXPECT_EQ(finding.health, Health::warn);
  EXPECT_THAT(finding.advice, HasSubstr("top"));
}

TEST_F(DoctorCores, WithoutProcTheyAreNotKnown) {
  std::filesystem::remove_all(roots().proc);
  const auto finding = check_cores(roots());
  EXPECT_EQ(finding.health, Health::warn);
  EXPECT_THAT(finding.found, HasSubstr("self/status"));
}

class DoctorMemory : public FakeMachine {
 protected:
  DoctorMemory() {
    write("proc/meminfo",
          "MemTotal:       16777216 kB\nMemFree:  1 kB\n"
          "MemAvailable:   12582912 kB\n");
    write("proc/self/cgroup", "0::/pod/job\n");
  }
};

TEST_F(DoctorMemory, WhatIsFreeIsTold) {
  const auto finding = check_memory(roots());
  EXPECT_EQ(finding.health, Health::ok);
  EXPECT_EQ(finding.found, "12.0 GiB of 16.0 GiB are free");
}

// Pages of files that were read fill a group's limit, but are given back.
TEST_F(DoctorMemory, TheCacheOfAControlGroupDoesNotCount) {
  write("sys/fs/cgroup/pod/memory.max", "4294967296\n");
  write("sys/fs/cgroup/pod/memory.current", "4294967296\n");
  write("sys/fs/cgroup/pod/memory.stat",
        "anon 1073741824\ninactive_file 3221225472\nactive_file 0\n");
  write("sys/fs/cgroup/pod/job/memory.max", "max\n");
  const auto finding = check_memory(roots());
  EXPECT_EQ(finding.health, Health::ok);
  EXPECT_EQ(finding.values["group_limit_bytes"], 4294967296);
  EXPECT_EQ(finding.values["group_left_bytes"], 3221225472);
  EXPECT_THAT(finding.found,
              HasSubstr("a control group has 3072 MiB left of 4096 MiB"));
}

TEST_F(DoctorMemory, TheGroupThatLeavesLeastCounts) {
  write("sys/fs/cgroup/pod/memory.max", "4294967296\n");
  write("sys/fs/cgroup/pod/memory.current", "0\n");
  write("sys/fs/cgroup/pod/job/memory.max", "1073741824\n");
  write("sys/fs/cgroup/pod/job/memory.current", "536870912\n");
  const auto little = check_memory(roots());
  EXPECT_EQ(little.health, Health::warn);
  EXPECT_THAT(little.found, HasSubstr("512 MiB left of 1024 MiB"));
  write("sys/fs/cgroup/pod/memory.current", "4290000000\n");
  const auto nothing = check_memory(roots());
  EXPECT_EQ(nothing.health, Health::fail);
  EXPECT_THAT(nothing.advice, HasSubstr("SIGKILL"));
}

TEST_F(DoctorMemory, GroupsOfVersionOneAreReadToo) {
  write("proc/self/cgroup", "4:memory:/job\n1:cpu:/job\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_TRUE(check_memory(roots()).values["group_limit_bytes"].is_null());
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1073741824\n");
  write("sys/fs/cgroup/memory/job/memory.stat",
        "inactive_file 1\ntotal_inactive_file 536870912\n");
  const auto finding = check_memory(roots());
  EXPECT_EQ(finding.health, Health::warn);
  EXPECT_EQ(finding.values["group_left_bytes"], 536870912);
}

TEST_F(DoctorMemory, WithoutProcItIsNotKnown) {
  std::filesystem::remove_all(roots().proc);
  EXPECT_EQ(check_memory(roots()).health, Health::warn);
}

class DoctorNuma : public FakeMachine {};

TEST_F(DoctorNuma, NodesThatThisProcessMayUseAreCounted) {
  write("proc/self/status", "Cpus_allowed_list:\t0-3\n");
  EXPECT_EQ(check_numa(roots()).values["nodes"], 0);
  write("sys/devices/system/node/online", "0-2\n");
  write("sys/devices/system/node/node0/cpulist", "0-3\n");
  EXPECT_EQ(check_numa(roots()).found,
            "all cores reach all memory equally fast");
  write("sys/devices/system/node/node1/cpulist", "4-7\n");
  write("sys/devices/system/node/node2/cpulist", "\n");  // memory alone
  const auto bound = check_numa(roots());
  EXPECT_EQ(bound.found,
            "2 nodes, with the cores 0-3 and 4-7; this process may use 1");
  EXPECT_EQ(bound.advice, "");
  write("proc/self/status", "Cpus_allowed_list:\t0-7\n");
  const auto free = check_numa(roots());
  EXPECT_EQ(free.health, Health::ok);
  EXPECT_EQ(free.values["usable"], 2);
  EXPECT_THAT(free.advice, HasSubstr("lockstep run --numa-binding=node"));
}

class DoctorHugePages : public FakeMachine {};

TEST_F(DoctorHugePages, TheChosenWordsAreTold) {
  const std::string folder = "sys/kernel/mm/transparent_hugepage/";
  EXPECT_EQ(check_huge_pages(roots()).found, "the kernel gives none by itself");
  write(folder + "enabled", "always [madvise] never\n");
  write(folder + "shmem_enabled",
        "always within_size advise [never] deny force\n");
  const auto never = check_huge_pages(roots());
  EXPECT_EQ(never.health, Health::ok);
  EXPECT_EQ(never.values["own_memory"], "madvise");
  EXPECT_EQ(never.values["shared_memory"], "never");
  EXPECT_THAT(never.advice, HasSubstr("echo advise > "));
  write(folder + "shmem_enabled",
        "always within_size [advise] never deny force\n");
  EXPECT_EQ(check_huge_pages(roots()).advice, "");
}

class DoctorDevShm : public FakeMachine {};

TEST_F(DoctorDevShm, AMissingOneIsAWarning) {
  const auto finding = check_dev_shm(roots());
  EXPECT_EQ(finding.health, Health::warn);
  EXPECT_EQ(finding.found, "is missing");
}

class DoctorLimits : public FakeMachine {
 protected:
  Finding limit(const std::string& name) {
    for (auto& finding : check_limits(roots())) {
      if (finding.name == name) return finding;
    }
    ADD_FAILURE() << "no check " << name;
    return {};
  }
};

TEST_F(DoctorLimits, FewOpenFilesAreAWarningAndTooFewAFailure) {
  {
    const LoweredLimit lowered(RLIMIT_NOFILE, 1024);
    EXPECT_EQ(limit("open files").health, Health::ok);
  }
  {
    const LoweredLimit lowered(RLIMIT_NOFILE, 200);
    const auto few = limit("open files");
    EXPECT_EQ(few.health, Health::warn);
    EXPECT_EQ(few.values["limit"], 200);
    EXPECT_THAT(few.found, StartsWith("200 "));
    EXPECT_THAT(few.advice, HasSubstr("ulimit -n 65536"));
    const bool by_root = lowered.before().rlim_max < 65536;
    EXPECT_EQ(few.advice.find("only root") != std::string::npos, by_root);
  }
  const LoweredLimit lowered(RLIMIT_NOFILE, 30);
  EXPECT_EQ(limit("open files").health, Health::fail);
}

TEST_F(DoctorLimits, ProcessesAreLimitedForTheUserAndForTheControlGroup) {
  write("proc/self/cgroup", "8:pids:/job\n");
  write("sys/fs/cgroup/pids/job/pids.max", "max\n");
  {
    const LoweredLimit lowered(RLIMIT_NPROC, 2000);
    EXPECT_EQ(limit("processes").health, Health::ok);
    write("sys/fs/cgroup/pids/job/pids.max", "1500\n");
    write("sys/fs/cgroup/pids/job/pids.current", "1000\n");
    const auto few = limit("processes");
    EXPECT_EQ(few.health, Health::warn);
    EXPECT_EQ(few.values["group_left"], 500);
    EXPECT_THAT(few.advice,
                AllOf(HasSubstr("--pids-limit"), Not(HasSubstr("ulimit -u"))));
    write("sys/fs/cgroup/pids/job/pids.current", "1490\n");
    EXPECT_EQ(limit("processes").health, Health::fail);
  }
  write("sys/fs/cgroup/pids/job/pids.max", "max\n");
  const LoweredLimit lowered(RLIMIT_NPROC, 1000);
  const auto few = limit("processes");
  EXPECT_EQ(few.health, Health::warn);
  EXPECT_THAT(few.advice, HasSubstr("ulimit -u"));
}

TEST_F(DoctorLimits, ALimitedFileSizeIsAWarningAndTriedOnSharedMemory) {
  if (limit("file size").health == Health::ok) {
    EXPECT_EQ(limit("file size").found, "unlimited");
  }
  EXPECT_EQ(check_shared_memory().health, Health::ok);
  const LoweredLimit lowered(RLIMIT_FSIZE, 1 << 20);
  const auto finding = limit("file size");
  EXPECT_EQ(finding.health, Health::warn);
  EXPECT_EQ(finding.found, "1 MiB");
  const auto memory = check_shared_memory();
  EXPECT_EQ(memory.health, Health::warn);
  EXPECT_THAT(memory.found, HasSubstr("ulimit -f"));
  EXPECT_THAT(memory.advice, HasSubstr("Gloo"));
}

TEST_F(DoctorLimits, LockedMemoryMattersWhereRdmaAdaptersAre) {
  const LoweredLimit lowered(RLIMIT_MEMLOCK, 65536);
  const auto without = limit("locked memory");
  EXPECT_EQ(without.health, Health::ok);
  EXPECT_EQ(without.found, "64 KiB");
  std::filesystem::create_directories(roots().sys / "class/infiniband/mlx5_0");
  const auto with = limit("locked memory");
  EXPECT_EQ(with.health, Health::warn);
  EXPECT_EQ(with.values["rdma_adapters"], 1);
  EXPECT_THAT(with.advice, HasSubstr("ulimit -l unlimited"));
}

TEST_F(DoctorLimits, CoreFilesAreNamed) {
  const LoweredLimit lowered(RLIMIT_CORE, 0);
  write("proc/sys/kernel/core_pattern", "/cores/%e\n");
  EXPECT_THAT(limit("core files").found, StartsWith("none"));
  write("proc/sys/kernel/core_pattern", "|/usr/lib/systemd/coredump %P %u\n");
  EXPECT_EQ(limit("core files").found, "go to /usr/lib/systemd/coredump");
}

TEST(DoctorClock, AClockThatNothingSynchronisesIsAWarning) {
  EXPECT_EQ(check_clock(ClockState{true, 3200}).health, Health::ok);
  EXPECT_EQ(check_clock(ClockState{true, 3200}).found,
            "synchronised, wrong by 3.2 ms at most");
  EXPECT_EQ(check_clock(ClockState{true, 2'000'000}).health, Health::warn);
  const auto alone = check_clock(ClockState{false, 16'000'000});
  EXPECT_EQ(alone.health, Health::warn);
  EXPECT_THAT(alone.advice, HasSubstr("chrony"));
  EXPECT_EQ(check_clock(std::nullopt).health, Health::ok);
}

}  // namespace
}  // namespace lockstep::internal::testing

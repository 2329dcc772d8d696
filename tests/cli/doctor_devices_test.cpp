// Tests what `lockstep doctor` says of GPUs and of network interfaces.
#include <gmock/gmock.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lockstep/cli/doctor/gpu_checks.h"
#include "lockstep/cli/doctor/network_checks.h"
#include "tests/cli/fake_machine.h"
#include "tests/cli/lowered_limit.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::StartsWith;

std::optional<NvmlAnswer> ask_fake(
    const char* behaviour, milliseconds allowed = std::chrono::seconds(20)) {
  setenv("FAKE_NVML", behaviour, 1);
  return ask_nvml(LOCKSTEP_FAKE_NVML, allowed);
}

TEST(DoctorNvml, GpusAndTheirPeersAreAsked) {
  const auto together = ask_fake("2");
  ASSERT_TRUE(together);
  EXPECT_EQ(together->error, "");
  EXPECT_EQ(together->driver, "580.82.07");
  ASSERT_EQ(together->gpus.size(), 2u);
  EXPECT_EQ(together->gpus[0].name, "GPU kind 1");
  EXPECT_EQ(together->gpus[0].memory_bytes, int64_t{80} << 30);
  EXPECT_THAT(together->apart, IsEmpty());
  const auto apart = ask_fake("3 apart");
  ASSERT_TRUE(apart);
  EXPECT_EQ(apart->gpus.size(), 3u);
  EXPECT_THAT(apart->apart, ElementsAre(Pair(0, 2), Pair(1, 2)));
}

TEST(DoctorNvml, TroubleIsToldAndWaitedForOnlySoLong) {
  EXPECT_EQ(ask_nvml("no-such-library.so", std::chrono::seconds(20)),
            std::nullopt);
  EXPECT_EQ(ask_fake("mismatch")->error, "Driver/library version mismatch");
  EXPECT_EQ(ask_fake("silent", milliseconds(100))->error,
            "no answer within 100 ms");
  EXPECT_EQ(ask_fake("crash")->error, "its library crashed");
  int status = 0;
  EXPECT_EQ(waitpid(-1, &status, WNOHANG), -1) << "a process was left";
}

TEST(DoctorNvml, GpusOfOtherJobsAreLeftOut) {
  const auto answer = ask_fake("3 denied");
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->error, "");
  ASSERT_EQ(answer->gpus.size(), 2u);
  EXPECT_EQ(answer->gpus[1].name, "GPU kind 2");
}

TEST(DoctorNvml, ThatNoProcessCanBeStartedIsTheAnswersError) {
  const LoweredLimit lowered(RLIMIT_NOFILE, 0);
  EXPECT_THAT(ask_nvml(LOCKSTEP_FAKE_NVML)->error, HasSubstr("pipe2"));
}

class DoctorGpus : public FakeMachine {
 protected:
  DoctorGpus() { unsetenv("CUDA_VISIBLE_DEVICES"); }
  ~DoctorGpus() override { unsetenv("CUDA_VISIBLE_DEVICES"); }

  void add_devices(int count) {
    for (int i = 0; i < count; ++i) write("dev/nvidia" + std::to_string(i), "");
    write("dev/nvidiactl", "");
  }
  void add_to_the_bus(const std::string& slot, const std::string& vendor,
                      const std::string& kind) {
    write("sys/bus/pci/devices/" + slot + "/vendor", vendor + "\n");
    write("sys/bus/pci/devices/" + slot + "/class", kind + "\n");
  }
};

TEST_F(DoctorGpus, AHostWithoutThemIsWell) {
  add_to_the_bus("0000:00:02.0", "0x8086", "0x030000");  // another maker's
  add_to_the_bus("0000:00:03.0", "0x10de", "0x040300");  // its sound
  const auto findings = check_gpus(roots(), std::nullopt);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].health, Health::ok);
  EXPECT_EQ(findings[0].found, "none");
}

TEST_F(DoctorGpus, AGpuWithoutItsDriverIsAWarning) {
  add_to_the_bus("0000:00:04.0", "0x10de", "0x030200");
  const auto findings = check_gpus(roots(), std::nullopt);
  EXPECT_EQ(findings[0].health, Health::warn);
  EXPECT_EQ(findings[0].values["on_the_bus"], 1);
  EXPECT_THAT(findings[0].advice, HasSubstr("--gpus all"));
}

TEST_F(DoctorGpus, KindsAndPeersAreTold) {
  add_devices(3);
  const auto well = check_gpus(roots(), ask_fake("3"));
  ASSERT_EQ(well.size(), 2u);
  EXPECT_EQ(well[0].health, Health::ok);
  EXPECT_EQ(well[0].found,
            "2 x GPU kind 1 (80.0 GiB), 1 x GPU kind 2 (80.0 GiB), driver "
            "580.82.07");
  EXPECT_EQ(well[0].values["visible"], 3);
  EXPECT_EQ(well[1].health, Health::ok);
  const auto apart = check_gpus(roots(), ask_fake("3 apart"));
  EXPECT_EQ(apart[1].health, Health::warn);
  EXPECT_EQ(apart[1].found,
            "2 of 3 pairs cannot read each other's memory: 0-2 1-2");
  EXPECT_THAT(apart[1].advice, HasSubstr("nvidia-smi topo -m"));
  // One GPU has no peers.
  EXPECT_EQ(check_gpus(roots(), ask_fake("1")).size(), 1u);
}

TEST_F(DoctorGpus, ADriverInTroubleIsAFailure) {
  add_devices(1);
  const auto findings = check_gpus(roots(), ask_fake("mismatch"));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].health, Health::fail);
  EXPECT_THAT(findings[0].found, HasSubstr("Driver/library version mismatch"));
  EXPECT_EQ(check_gpus(roots(), std::nullopt)[0].health, Health::warn);
}

TEST_F(DoctorGpus, WhatCudaVisibleDevicesLeavesIsTold) {
  add_devices(2);
  setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  const auto one = check_gpus(roots(), ask_fake("2"));
  EXPECT_EQ(one[0].health, Health::ok);
  EXPECT_THAT(one[0].found, HasSubstr("CUDA_VISIBLE_DEVICES=1 leaves 1"));
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  const auto none = check_gpus(roots(), ask_fake("2"));
  EXPECT_EQ(none[0].health, Health::warn);
  EXPECT_THAT(none[0].advice, HasSubstr("Unset CUDA_VISIBLE_DEVICES"));
}

TEST_F(DoctorGpus, OnlyIfNoDeviceMayBeOpenedIsThatAFailure) {
  add_devices(2);
  std::filesystem::permissions(root(), std::filesystem::perms::all);
  const auto refuse = [&](const char* device) {
    std::filesystem::permissions(roots().dev / device,
                                 std::filesystem::perms::none);
  };
  std::filesystem::permissions(roots().dev / "nvidia1",
                               std::filesystem::perms::all);
  const auto nvml = ask_fake("2");
  // Returns 0 if a user who is not root is told this.
  const auto is_told = [&](Health health, const std::string& part) {
    const pid_t child = fork();
    if (child == 0) {
      if (geteuid() == 0 && setuid(65534) != 0) _exit(9);
      const auto finding = check_gpus(roots(), nvml)[0];
      if (finding.health != health) _exit(1);
      _exit(finding.found.find(part) == std::string::npos ? 2 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  };
  refuse("nvidia0");
  EXPECT_EQ(is_told(Health::ok, "may open 1 of 2"), 0);
  refuse("nvidia1");
  EXPECT_EQ(is_told(Health::fail, "driver"), 0);
}

NetworkInterface interface(const std::string& name, const std::string& address,
                           bool up = true) {
  NetworkInterface one{
      .name = name, .up = up, .loopback = name.starts_with("lo")};
  if (!address.empty()) one.addresses.push_back(address);
  return one;
}

const std::vector<NetworkInterface> kUsual{
    interface("lo", "127.0.0.1"), interface("eth0", "10.0.0.5"),
    interface("eth1", "10.1.0.5", false), interface("docker0", "172.17.0.1")};

TEST(DoctorNetwork, InterfacesAreListedWithTheirSpeed) {
  auto interfaces = kUsual;
  interfaces[1].mbits = 10'000;
  const auto finding = check_interfaces(interfaces);
  EXPECT_EQ(finding.health, Health::ok);
  EXPECT_EQ(finding.found,
            "lo 127.0.0.1, eth0 10.0.0.5 (10 Gb/s), docker0 172.17.0.1");
  EXPECT_EQ(finding.values["interfaces"][2]["up"], false);
}

TEST(DoctorNetwork, WithoutLoopbackNothingWorks) {
  for (const auto& interfaces :
       {std::vector{interface("eth0", "10.0.0.5")},
        std::vector{interface("lo", "127.0.0.1", false)},
        std::vector{interface("lo", "")}, std::vector<NetworkInterface>{}}) {
    const auto finding = check_interfaces(interfaces);
    EXPECT_EQ(finding.health, Health::fail) << finding.found;
    EXPECT_THAT(finding.advice, HasSubstr("ip link set lo up"));
  }
}

TEST(DoctorNetwork, TheRealInterfacesHaveLoopback) {
  const auto all = network_interfaces({});
  const auto lo =
      std::ranges::find_if(all, [](const auto& one) { return one.loopback; });
  ASSERT_NE(lo, all.end());
  EXPECT_EQ(lo->name, "lo");
  EXPECT_THAT(lo->addresses, ::testing::Contains("127.0.0.1"));
}

const OwnAddress kLoopback{.interface = "", .address = "127.0.0.1"};

TEST(DoctorGloo, InterfacesOfTheAddressesAreNamed) {
  const auto alone = check_gloo(kUsual, kLoopback, {}, std::nullopt);
  EXPECT_EQ(alone.health, Health::ok);
  EXPECT_EQ(alone.found,
            "lo on one host; between hosts the interface towards MASTER_ADDR, "
            "which is not set");
  const auto towards = check_gloo(
      kUsual, kLoopback, {.interface = "", .address = "10.0.0.5"}, "10.0.0.9");
  EXPECT_EQ(towards.found,
            "lo on one host; between hosts eth0 (10.0.0.5), towards "
            "MASTER_ADDR");
  EXPECT_EQ(towards.values["several_hosts"], "eth0");
  const auto inside = check_gloo(kUsual, kLoopback, {}, "127.0.0.1");
  EXPECT_EQ(inside.health, Health::ok);
  const auto unknown = check_gloo(kUsual, kLoopback, {}, "no.such.host");
  EXPECT_EQ(unknown.health, Health::warn);
  EXPECT_THAT(unknown.advice, HasSubstr("\"no.such.host\""));
}

TEST(DoctorGloo, WithoutLoopbackThereIsNoneOnOneHost) {
  const auto finding = check_gloo({}, kLoopback, {}, std::nullopt);
  EXPECT_THAT(finding.found, StartsWith("no interface on one host; "));
  EXPECT_TRUE(finding.values["one_host"].is_null());
}

TEST(DoctorGloo, AnInterfaceThatIsNamedMustBeThere) {
  const auto named = [](const std::string& name) {
    const OwnAddress both{.interface = name, .address = ""};
    return check_gloo(kUsual, both, both, "10.0.0.9");
  };
  EXPECT_EQ(named("eth0").health, Health::ok);
  EXPECT_EQ(named("eth0").found, "eth0, named by GLOO_SOCKET_IFNAME");
  EXPECT_EQ(named("eth7").health, Health::fail);
  EXPECT_THAT(named("eth7").advice,
              AllOf(HasSubstr("no interface of that name"),
                    HasSubstr("lo, eth0, docker0")));
  EXPECT_EQ(named("eth1").health, Health::fail);
}

TEST(DoctorNccl, InterfacesAreChosenAsNcclDoes) {
  const auto chosen = [](const std::optional<std::string>& wanted) {
    return nccl_interfaces(kUsual, wanted);
  };
  EXPECT_THAT(chosen(std::nullopt), ElementsAre("eth0"));
  EXPECT_THAT(chosen("eth"), ElementsAre("eth0"));  // eth1 is down
  EXPECT_THAT(chosen("=eth"), IsEmpty());
  EXPECT_THAT(chosen("=docker0,lo"), ElementsAre("lo", "docker0"));
  EXPECT_THAT(chosen("^lo,docker"), ElementsAre("eth0"));
  EXPECT_THAT(chosen("^=docker"), ElementsAre("lo", "eth0", "docker0"));
  auto with_ib = kUsual;
  with_ib.push_back(interface("ib0", "10.9.0.1"));
  EXPECT_THAT(nccl_interfaces(with_ib, std::nullopt), ElementsAre("ib0"));
  EXPECT_THAT(nccl_interfaces({kUsual[0], kUsual[3]}, std::nullopt),
              ElementsAre("docker0"));
  EXPECT_THAT(nccl_interfaces({kUsual[0]}, std::nullopt), ElementsAre("lo"));
}

TEST(DoctorNccl, NoInterfaceIsAFailureIfThereAreGpus) {
  EXPECT_EQ(check_nccl(kUsual, std::nullopt, 1).found, "eth0 for its sockets");
  const auto none = check_nccl(kUsual, "mlx", 1);
  EXPECT_EQ(none.health, Health::fail);
  EXPECT_EQ(check_nccl(kUsual, "mlx", 0).health, Health::warn);
  EXPECT_EQ(none.found,
            "no interface for its sockets, by NCCL_SOCKET_IFNAME=mlx");
}

}  // namespace
}  // namespace lockstep::internal::testing


#include <gmock/gmock.h>
#include <stdlib.h>

#include <filesystem>
#include <numeric>
#include <stdexcept>

#include "lockstep/launch/process/cpu_topology.h"
#include "tests/launch/fake_system.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Sets = std::vector<std::set<int>>;

std::set<int> first_cpus(int count) {
  std::set<int> cpus;
  for (int cpu = 0; cpu < count; ++cpu) cpus.insert(cpu);
  return cpus;
}

class NumaBindingTest : public ::testing::Test {
 protected:
  NumaBindingTest() {
    unsetenv("CUDA_VISIBLE_DEVICES");
    std::string name = (fs::temp_directory_path() / "system_XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    system_.emplace(name);
  }
  ~NumaBindingTest() override {
    unsetenv("CUDA_VISIBLE_DEVICES");
    fs::remove_all(system_->root());
  }

  CpuTopology topology(const FakeSystem::Host& host,
                       const std::set<int>& allowed = {}) {
    system_->add_host(host);
    return read_cpu_topology(
        allowed.empty() ? first_cpus(host.cpus()) : allowed, system_->system());
  }

  std::optional<FakeSystem> system_;
};

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was refused";
}

// Ranks without GPUs: torchrun has no rule for them.
TEST_F(NumaBindingTest, RanksWithoutGpusAreSpreadOverTheNodes) {
  const CpuTopology two_nodes =
      topology({.sockets = 2, .cores_per_cache = 4, .threads_per_core = 2});
  EXPECT_THAT(spread_over_nodes(two_nodes, 4), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(spread_over_nodes(two_nodes, 3), ElementsAre(0, 0, 1));
  EXPECT_THAT(spread_over_nodes(two_nodes, 1), ElementsAre(0));
  const auto bound = [&](NumaBinding binding, int workers) {
    return bind_to_cpus(binding, two_nodes,
                        spread_over_nodes(two_nodes, workers), workers);
  };
  const std::set<int> first{0, 1, 2, 3, 8, 9, 10, 11};
  const std::set<int> second{4, 5, 6, 7, 12, 13, 14, 15};
  EXPECT_EQ(bound(NumaBinding::node, 2), (Sets{first, second}));
  EXPECT_EQ(
      bound(NumaBinding::exclusive, 4),
      (Sets{{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}}));
  // Three cores on a node with two ranks: the first gets the odd one.
  const CpuTopology fewer =
      topology({.sockets = 2, .cores_per_cache = 4, .threads_per_core = 2},
               {0, 1, 2, 8});
  EXPECT_EQ(bind_to_cpus(NumaBinding::exclusive, fewer,
                         spread_over_nodes(fewer, 2), 2),
            (Sets{{0, 1, 8}, {2}}));
  EXPECT_THAT(refusal([&] { bound(NumaBinding::exclusive, 10); }),
              HasSubstr("NUMA node 0 this process may use 4 for 5"));
}

TEST_F(NumaBindingTest, NodeOfAGpuWithoutAllowedCpusIsRefused) {
  const CpuTopology first_node =
      topology({.sockets = 2, .cores_per_cache = 2}, {0, 1});
  EXPECT_THAT(
      refusal([&] { bind_to_cpus(NumaBinding::node, first_node, {0, 1}, 2); }),
      HasSubstr("local rank 1 belongs to NUMA node 1"));
  EXPECT_EQ(bind_to_cpus(NumaBinding::node, first_node, {0, 1}, 1),
            (Sets{{0, 1}}));
}

// A container may have the files /dev/nvidia0... and not the driver's list.
TEST_F(NumaBindingTest, GpusThatTheDriverDoesNotListAreRefused) {
  const CpuTopology host = topology({.sockets = 2, .cores_per_cache = 2});
  const auto bind = [&] {
    bind_to_cpus(NumaBinding::node, host, numa_nodes_of_gpus(system_->root()),
                 2);
  };
  EXPECT_THAT(refusal(bind), HasSubstr("lists 0 GPUs"));
  system_->add_gpu("0000:18:00.0", 1, "GPU-aaaa");
  EXPECT_THAT(refusal(bind), HasSubstr("lists 1 GPUs"));
}

TEST_F(NumaBindingTest, KernelThatSaysNothingIsOneNode) {
  const CpuTopology bare = read_cpu_topology({0, 1, 2, 3}, "/no/such/folder");
  EXPECT_EQ(bind_to_cpus(NumaBinding::exclusive, bare, {0, 0}, 2),
            (Sets{{0, 1}, {2, 3}}));
  EXPECT_EQ(bind_to_cpus(NumaBinding::core_complex, bare, {0}, 1),
            (Sets{{0, 1, 2, 3}}));
}

TEST_F(NumaBindingTest, GpusAreInTheOrderOfTheBusAndOfTheVariable) {
  system_->add_gpu("0000:c1:00.0", 3, "GPU-cccc");
  system_->add_gpu("0000:18:00.0", -1, "GPU-aaaa");
  system_->add_gpu("0000:5e:00.0", 1, "GPU-bbbb");
  const auto nodes = [&](const char* visible) {
    setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    return numa_nodes_of_gpus(system_->root());
  };
  EXPECT_THAT(numa_nodes_of_gpus(system_->root()), ElementsAre(0, 1, 3));
  EXPECT_THAT(nodes("2,0"), ElementsAre(3, 0));
  EXPECT_THAT(nodes("GPU-bb,1"), ElementsAre(1, 1));
  for (const char* unknown : {"MIG-1", "GPU-dddd"}) {
    EXPECT_THAT(refusal([&] { nodes(unknown); }), HasSubstr(unknown));
  }
}

TEST_F(NumaBindingTest, ThreadsAreTheShareOfPhysicalCores) {
  const CpuTopology host =
      topology({.sockets = 2, .cores_per_cache = 4, .threads_per_core = 2});
  const Sets unbound(3, first_cpus(16));
  EXPECT_THAT(share_of_cores(host, unbound, {}), ElementsAre(2, 2, 2));
  EXPECT_THAT(share_of_cores(host, unbound, 4.5), ElementsAre(1, 1, 1));
  EXPECT_THAT(share_of_cores(host, {{0, 1, 8, 9}, {2}, {2}}, {}),
              ElementsAre(2, 1, 1));
  EXPECT_THAT(share_of_cores(host, {{0, 1, 2}, {3}, {4}}, 100),
              ElementsAre(3, 1, 1));
}

}  // namespace
}  // namespace lockstep::internal::testing

#include "lockstep/observe/system_metrics.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/harness/in_child.h"
#include "tests/harness/message_of.h"
#include "tests/observe/event_records.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using namespace std::chrono_literals;

TEST(SystemMetrics, CountTheWorkAndTheMemoryOfThisProcess) {
  const SystemMetrics before = system_metrics();
  std::vector<char> memory(64 << 20, 1);
  const auto cpu = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(usage.ru_utime.tv_usec +
                                      usage.ru_stime.tv_usec);
  };
  const double first = cpu();
  while (cpu() - first < 0.05) {
  }
  const SystemMetrics after = system_metrics();
  EXPECT_GE(after.cpu_seconds, before.cpu_seconds + 0.05);
  EXPECT_LE(after.cpu_seconds, cpu());
  EXPECT_GE(after.resident_bytes - before.resident_bytes, 60 << 20);
  EXPECT_EQ(memory[1000], 1);
  EXPECT_GT(after.time, before.time);
}

TEST(SystemMetrics, PercentIsOfOneCore) {
  SystemMetrics earlier{.cpu_seconds = 10};
  SystemMetrics later{.time = earlier.time + 4s, .cpu_seconds = 13};
  EXPECT_DOUBLE_EQ(cpu_percent(earlier, later), 75);
  EXPECT_EQ(cpu_percent(later, later), 0);
}

// Returns the bytes of a direction ("rx" or "tx") from another place, without
// those of the loopback interface.
int64_t network_bytes(const std::string& direction) {
  int64_t bytes = 0;
  for (const auto& interface :
       std::filesystem::directory_iterator("/sys/class/net")) {
    const auto file = interface.path() / "statistics" / (direction + "_bytes");
    if (interface.path().filename() == "lo" || !std::filesystem::exists(file)) {
      continue;
    }
    bytes += std::stoll(read_file(file));
  }
  return bytes;
}

TEST(SystemMetrics, NetworkIsAllButTheLoopback) {
  const auto received = network_bytes("rx");
  const auto sent = network_bytes("tx");
  const SystemMetrics metrics = system_metrics();
  EXPECT_GE(metrics.received_bytes, received);
  EXPECT_LE(metrics.received_bytes, network_bytes("rx"));
  EXPECT_GE(metrics.sent_bytes, sent);
  EXPECT_LE(metrics.sent_bytes, network_bytes("tx"));
}

// In name spaces of its own, where nothing else uses shared memory or network.
TEST(SystemMetrics, SharedMemoryAndNetworkAreThoseOfTheHost) {
  constexpr int kSkipped = 77;
  const int result = in_child([&] {
    const bool root = ::geteuid() == 0;
    if (::unshare(CLONE_NEWNS | CLONE_NEWNET | (root ? 0 : CLONE_NEWUSER)) !=
            0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m") != 0) {
      return kSkipped;
    }
    write_file("/dev/shm/some", std::string(256 << 10, 'x'));
    const SystemMetrics metrics = system_metrics();
    if (metrics.shared_memory_bytes != 256 << 10) return 1;
    if (metrics.shared_memory_size != 1 << 20) return 2;
    if (metrics.received_bytes != 0 || metrics.sent_bytes != 0) return 3;
    return 0;
  });
  if (result == kSkipped) GTEST_SKIP() << "no right to make name spaces";
  EXPECT_EQ(result, 0);
}

// In a process of its own that has loaded what stands for CUDA's driver and for
// NVIDIA's management library.
TEST(SystemMetrics, GpusAreThoseOnWhichTheProcessComputes) {
  const SystemMetrics without = system_metrics();
  EXPECT_FALSE(without.gpu_percent || without.gpu_memory_bytes ||
               without.gpu_watts || without.gpu_celsius);
  const TemporaryFolder folder;
  const int result = in_child([&] {
    ::setenv("FAKE_NVML", "2 busy", 1);
    ::setenv("LOCAL_RANK", "1", 1);
    if (::dlopen(LOCKSTEP_FAKE_NVML, RTLD_NOW) == nullptr ||
        ::dlopen(LOCKSTEP_FAKE_CUDA, RTLD_NOW) == nullptr) {
      return 1;
    }
    const SystemMetrics metrics = system_metrics();
    if (metrics.gpu_percent != 40.0) return 2;
    if (metrics.gpu_memory_bytes != (1 << 30) + 1) return 3;
    if (metrics.gpu_watts != 200.5 || metrics.gpu_celsius != 60.0) return 4;
    SummaryWriter writer(folder.path(), {.max_queue = 1});
    const std::string file = event_file_in(folder.path());
    {
      const SystemMetricsSampler sampler(writer, {.interval = 1ms});
      const auto deadline = std::chrono::steady_clock::now() + 20s;
      while (std::filesystem::file_size(file) < 1000 &&
             std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(1ms);
      }
    }
    writer.close();
    for (const char* tag : {"system/gpu_percent", "system/gpu_memory_bytes",
                            "system/gpu_watts", "system/gpu_celsius"}) {
      if (read_file(file).find(tag) == std::string::npos) return 5;
    }
    return 0;
  });
  EXPECT_EQ(result, 0);
}

TEST(SystemMetricsSampler, WritesFiveScalarsEachTime) {
  const TemporaryFolder folder;
  SummaryWriter writer(folder.path(), {.max_queue = 1});
  const std::string file = event_file_in(folder.path());
  {
    const SystemMetricsSampler sampler(writer, {.interval = 1ms});
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (std::filesystem::file_size(file) < 1000 &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(1ms);
    }
  }
  writer.close();
  const auto events = events_of(file);
  ASSERT_GE(events.size(), 1 + 5);
  EXPECT_EQ((events.size() - 1) % 5, 0);
  const char* const tags[] = {"cpu_percent", "resident_bytes",
                              "shared_memory_bytes", "received_bytes",
                              "sent_bytes"};
  for (size_t at = 1; at < events.size(); ++at) {
    EXPECT_THAT(events[at],
                HasSubstr(std::string("system/") + tags[(at - 1) % 5]));
  }
}

TEST(SystemMetricsSampler, EndsAtOnceAndWithTheWriter) {
  const TemporaryFolder folder;
  SummaryWriter writer(folder.path());
  const SystemMetricsSampler one(writer, {.interval = 1ms});
  const SystemMetricsSampler two(writer, {.interval = 24h});
  writer.close();
  std::this_thread::sleep_for(5ms);  // `one` meets the closed writer
  EXPECT_THAT(message_of([&] {
                SystemMetricsSampler never(writer, {.interval = 0ms});
              }),
              HasSubstr("interval is 0 ms; give 1 ms or more"));
}

}  // namespace
}  // namespace lockstep::internal

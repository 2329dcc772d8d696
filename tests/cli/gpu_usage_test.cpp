// Tests what a process learns of its use of GPUs, from a library that stands
// for NVIDIA's.
#include "lockstep/worker/nvml.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <functional>

#include "tests/harness/in_child.h"

namespace lockstep::internal::testing {
namespace {

constexpr int kHolds = 42;

// Returns whether `check` holds of gpu_usage() in a process of its own that has
// loaded CUDA's driver, or not.
bool holds(const char* behaviour, bool with_cuda,
           const std::function<bool(const std::optional<GpuUsage>&)>& check,
           const char* library = LOCKSTEP_FAKE_NVML) {
  return in_child([&] {
           setenv("FAKE_NVML", behaviour, 1);
           unsetenv("LOCAL_RANK");
           if (with_cuda && dlopen(LOCKSTEP_FAKE_CUDA, RTLD_NOW) == nullptr) {
             return 1;
           }
           return check(gpu_usage(library)) ? kHolds : 0;
         }) == kHolds;
}

bool is_nothing(const std::optional<GpuUsage>& usage) { return !usage; }

TEST(GpuUsage, FiguresAreThoseOfTheGpusThatTheProcessUses) {
  EXPECT_TRUE(holds("2 busy", true, [](const auto& usage) {
    return usage && usage->gpus == 1 && usage->memory_bytes == 1 << 30 &&
           usage->busy_percent == 30.0 && usage->watts == 200.0 &&
           usage->celsius == 61;
  }));
}

TEST(GpuUsage, OfSeveralGpusThereIsASumAMeanAndTheHottest) {
  EXPECT_TRUE(holds("2 spread", true, [](const auto& usage) {
    return usage && usage->gpus == 2 &&
           usage->memory_bytes == (int64_t{2} << 30) + 1 &&
           usage->busy_percent == 35.0 && usage->watts == 400.5 &&
           usage->celsius == 61;
  }));
}

TEST(GpuUsage, AFigureThatOneOfThemDoesNotTellIsNothing) {
  EXPECT_TRUE(holds("2 secretive", true, [](const auto& usage) {
    return usage && usage->gpus == 2 && !usage->memory_bytes &&
           !usage->busy_percent && !usage->watts && !usage->celsius;
  }));
}

TEST(GpuUsage, AProcessThatUsesNoneHasNone) {
  EXPECT_TRUE(holds("2", true, is_nothing));
  EXPECT_TRUE(holds("0", true, is_nothing));
}

TEST(GpuUsage, WithoutADriverThatAnswersThereIsNothing) {
  EXPECT_TRUE(holds("mismatch", true, is_nothing));
  EXPECT_TRUE(holds("2 busy", true, is_nothing, "libno-such-nvml.so.1"));
}

// A driver that hangs must not hold up a process that uses no GPU.
TEST(GpuUsage, AProcessWithoutCudaDoesNotAsk) {
  EXPECT_TRUE(holds("silent", false, is_nothing));
  EXPECT_TRUE(holds("2 busy", false, is_nothing));
}

TEST(GpuUsage, AChildAsksAnew) {
  EXPECT_TRUE(holds("2 busy", true, [](const auto& usage) {
    return usage && in_child([] {
                      const auto own = gpu_usage(LOCKSTEP_FAKE_NVML);
                      return own && own->gpus == 1 ? kHolds : 0;
                    }) == kHolds;
  }));
}

}  // namespace
}  // namespace lockstep::internal::testing

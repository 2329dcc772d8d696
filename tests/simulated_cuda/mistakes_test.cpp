// Programs with a mistake that a CUDA device punishes only sometimes. Each is
// found by one of the first 50 seeds, and without the mistake it is right with
// every seed.

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal {
namespace {

constexpr uint64_t kSeeds = 50;
constexpr int64_t kElements = 1000;

const torch::Device kDevice("cuda:0");

const c10::impl::VirtualGuardImpl& cuda() {
  static const c10::impl::VirtualGuardImpl implementation(torch::kCUDA);
  return implementation;
}

// A program uses the default stream, which is the current one, and another.
struct Streams {
  c10::Stream main = cuda().getStream(kDevice);
  c10::Stream side = cuda().getStreamFromGlobalPool(kDevice, false);
};

void wait(const c10::Stream& waiting, const c10::Stream& awaited) {
  c10::Event event(torch::kCUDA);
  event.record(awaited);
  event.block(waiting);
}

torch::Tensor filled(double value) {
  return torch::full({kElements}, value, kDevice);
}

bool is_all(const torch::Tensor& tensor, double value) {
  return tensor.cpu().eq(value).all().item<bool>();
}

// Returns whether its result is right; makes its mistake if `mistaken`.
using Program = bool (*)(const Streams& streams, bool mistaken);

bool reads_before_it_is_written(const Streams& streams, bool mistaken) {
  const auto x = filled(1);
  if (!mistaken) wait(streams.side, streams.main);
  x.record_stream(streams.side);
  const c10::StreamGuard guard(streams.side);
  return is_all(x + 1, 2);
}

bool writes_before_it_is_read(const Streams& streams, bool mistaken) {
  const auto x = filled(1);
  x.record_stream(streams.side);
  wait(streams.side, streams.main);
  const auto sum = x + 1;
  if (!mistaken) wait(streams.side, streams.main);
  {
    const c10::StreamGuard guard(streams.side);
    x.fill_(5);
  }
  return is_all(sum, 2);
}

bool records_too_early(const Streams& streams, bool mistaken) {
  const auto x = filled(1);
  c10::Event event(torch::kCUDA);
  if (mistaken) event.record(streams.main);
  x.add_(1);
  if (!mistaken) event.record(streams.main);
  event.block(streams.side);
  x.record_stream(streams.side);
  const c10::StreamGuard guard(streams.side);
  return is_all(x * 2, 4);
}

bool frees_what_another_stream_reads(const Streams& streams, bool mistaken) {
  auto x = filled(1);
  wait(streams.side, streams.main);
  torch::Tensor sum;
  {
    const c10::StreamGuard guard(streams.side);
    sum = x + 1;
  }
  if (!mistaken) x.record_stream(streams.side);
  x = torch::Tensor();
  const auto other = filled(7);  // has the memory of x if nobody recorded
  const c10::StreamGuard guard(streams.side);
  return is_all(sum, 2);
}

bool uses_a_helper_of_another_stream(const Streams& streams, bool mistaken) {
  torch::Tensor helper;
  {
    const c10::StreamGuard guard(mistaken ? streams.side : streams.main);
    helper = filled(3);
  }
  return is_all(filled(1) + helper, 4);
}

bool overwrites_pinned_memory(const Streams& streams, bool mistaken) {
  const auto pinned =
      torch::ones({kElements}, torch::TensorOptions().pinned_memory(true));
  torch::Tensor copy;
  c10::Event copied(torch::kCUDA);
  {
    const c10::StreamGuard guard(streams.side);
    copy = pinned.to(kDevice, /*non_blocking=*/true);
    copied.record(streams.side);
  }
  if (!mistaken) copied.synchronize();
  pinned.fill_(5);
  copied.block(streams.main);
  copy.record_stream(streams.main);
  return is_all(copy, 1);
}

bool uses_a_copy_ahead_too_early(const Streams& streams, bool mistaken) {
  const auto pinned =
      torch::ones({kElements}, torch::TensorOptions().pinned_memory(true));
  torch::Tensor copy;
  {
    const c10::StreamGuard guard(streams.side);
    copy = pinned.to(kDevice, /*non_blocking=*/true);
  }
  if (!mistaken) wait(streams.main, streams.side);
  copy.record_stream(streams.main);
  return is_all(copy + 1, 2);
}

bool reads_pinned_memory_too_early(const Streams& streams, bool mistaken) {
  const auto x = filled(2);
  const auto host = x.to(torch::kCPU, /*non_blocking=*/true);
  if (!mistaken) cuda().synchronizeStream(streams.main);
  return host.eq(2).all().item<bool>();
}

bool reads_a_result_of_another_device(const Streams& /*streams*/,
                                      bool mistaken) {
  const auto source = filled(1);
  const auto target = torch::zeros({kElements}, torch::Device("cuda:1"));
  const c10::Stream side =
      cuda().getStreamFromGlobalPool(target.device(), false);
  wait(side, cuda().getStream(target.device()));
  {
    const c10::StreamGuard guard(side);
    target.copy_(source, /*non_blocking=*/true);
  }
  if (!mistaken) wait(cuda().getStream(target.device()), side);
  return is_all(target, 1);
}

struct Mistake {
  const char* name;
  Program program;
};

constexpr Mistake kMistakes[] = {
    {"ReadsBeforeItIsWritten", reads_before_it_is_written},
    {"WritesBeforeItIsRead", writes_before_it_is_read},
    {"RecordsTooEarly", records_too_early},
    {"FreesWhatAnotherStreamReads", frees_what_another_stream_reads},
    {"UsesAHelperOfAnotherStream", uses_a_helper_of_another_stream},
    {"OverwritesPinnedMemory", overwrites_pinned_memory},
    {"UsesACopyAheadTooEarly", uses_a_copy_ahead_too_early},
    {"ReadsPinnedMemoryTooEarly", reads_pinned_memory_too_early},
    {"ReadsAResultOfAnotherDevice", reads_a_result_of_another_device},
};

class SimulatedMistakes : public ::testing::TestWithParam<Mistake> {
 protected:
  int wrong_results(bool mistaken) {
    int wrong = 0;
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      simulated_cuda::restart(seed);
      if (!GetParam().program({}, mistaken)) ++wrong;
    }
    return wrong;
  }
};

TEST_P(SimulatedMistakes, IsFound) {
  const int wrong = wrong_results(/*mistaken=*/true);
  RecordProperty("seeds that find it", wrong);
  EXPECT_GT(wrong, 0);
}

TEST_P(SimulatedMistakes, TheRightProgramIsRight) {
  EXPECT_EQ(wrong_results(/*mistaken=*/false), 0);
}

INSTANTIATE_TEST_SUITE_P(Programs, SimulatedMistakes,
                         ::testing::ValuesIn(kMistakes),
                         [](const auto& test) { return test.param.name; });

using SimulatedMistakesDeathTest = ::testing::Test;

TEST(SimulatedMistakesDeathTest, TheHostReadsDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const auto x = filled(1);
        [[maybe_unused]] const volatile float read = x.data_ptr<float>()[3];
      },
      "the host read or wrote memory of cuda:0");
}

TEST(SimulatedMistakesDeathTest, TheHostWritesDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(filled(1).data_ptr<float>()[3] = 1,
               "the host read or wrote memory of cuda:0");
}

TEST(SimulatedMistakesDeathTest, AllocatorFreesTwice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        auto* const allocator = c10::GetAllocator(torch::kCUDA);
        void* const memory = allocator->raw_allocate(8);
        allocator->raw_deallocate(memory);
        allocator->raw_deallocate(memory);
      },
      "was freed twice");
}

TEST(SimulatedDevices, RefuseTensorsOfTwoDevices) {
  const auto here = filled(1);
  const auto there = torch::ones({kElements}, torch::Device("cuda:1"));
  const auto host = torch::ones({kElements});
  EXPECT_THROW(here + there, c10::Error);
  EXPECT_THROW(here + host, c10::Error);
  EXPECT_THROW(here.view({10, 100}).mm(there.view({100, 10})), c10::Error);
  EXPECT_THROW(
      torch::embedding(here.view({10, 100}), torch::zeros({1}, torch::kLong)),
      c10::Error);
  EXPECT_THROW(torch::ones({2}, torch::Device("cuda:9")), c10::Error);
  EXPECT_EQ((here + torch::ones({})).sum().item<float>(), 2 * kElements);
}

}  // namespace
}  // namespace lockstep::internal

// A profile and the spans of a training on devices: what they show is in order,
// and nothing waits for the device or reads its memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/observe/profiler.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/trace/span.h"
#include "tests/observe/trace.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::Trace;
using testing::with_delays;
using testing::World;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

// How often the host waited for the device in each step of a training.
std::vector<int64_t> waits_of_steps(const at::Device& device,
                                    Profiler* profiler) {
  torch::manual_seed(1);
  Sequential net(Linear(8, 16), torch::nn::Tanh(), Linear(16, 4));
  net->to(device);
  DistributedDataParallel<Sequential> model(net, {.bucket_cap_mb = 1e-6});
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  const Tensor x = torch::ones({2, 8}, device);
  std::vector<int64_t> waits;
  for (int step = 0; step < 6; ++step) {
    const int64_t before = simulated_cuda::counters().host_waits;
    optimizer.zero_grad();
    model(x).square().mean().backward();
    optimizer.step();
    waits.push_back(simulated_cuda::counters().host_waits - before);
    if (profiler != nullptr) profiler->step();
  }
  return waits;
}

WORLD_TEST(ProfilesOnDevices, HaveEachBucketInOrderAndDoNotWaitForTheDevice,
           2) {
  with_delays([&](const at::Device& device) {
    const auto folder = world.folder / "profile";
    if (world.rank == 0) std::filesystem::remove_all(folder);
    barrier();
    const auto without = waits_of_steps(device, nullptr);
    std::vector<int64_t> with;
    {
      Profiler profiler(
          {.folder = folder,
           .schedule = {{.wait = 2, .warmup = 1, .active = 2, .repeat = 1}},
           .record_shapes = true,
           .profile_memory = true,
           .execution_trace = true});
      with = waits_of_steps(device, &profiler);
    }
    EXPECT_EQ(with, without);
    const std::string file =
        folder / ("rank" + std::to_string(world.rank) + ".3.pt.trace.json");
    const Trace trace(file);
    std::vector<int64_t> buckets;
    int64_t before = 0;
    for (const auto& event : trace.events("lockstep::ddp::publish_bucket")) {
      buckets.push_back(event.at("args").at("bucket").get<int64_t>());
      EXPECT_LE(before, trace.begin_ns(event));
      before = trace.end_ns(event);
    }
    EXPECT_THAT(buckets, ElementsAre(0, 1, 2, 3, 0, 1, 2, 3));
    EXPECT_EQ(trace.counts("lockstep::ddp::wait")["lockstep::ddp::wait"], 2);
    EXPECT_EQ(trace.counts("ProfilerStep").size(), 2U);
    barrier();
  });
}

// The ends of the spans of all_reduce, by the number of the call.
class AllReduceSpans : public SpanObserver {
 public:
  void on_begin(const SpanBegin& begin) noexcept override {
    if (begin.name != "all_reduce") return;
    const std::lock_guard lock(mutex_);
    for (const auto& [key, value] : begin.attributes) {
      if (key == "number") numbers_[begin.id] = std::get<int64_t>(value);
    }
  }
  void on_end(const SpanEnd& end) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = numbers_.find(end.id);
    if (found == numbers_.end()) return;
    EXPECT_FALSE(end.failed);
    ended_.push_back(found->second);
  }
  size_t begun() const {
    const std::lock_guard lock(mutex_);
    return numbers_.size();
  }
  std::vector<int64_t> ended() const {
    const std::lock_guard lock(mutex_);
    return ended_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, int64_t> numbers_;
  std::vector<int64_t> ended_;
};

// A span of a collective is as long as the collective on its stream, and not as
// the call: the call returns before the operation has begun.
WORLD_TEST(SpansOnDevices, EndInOrderWhenTheDeviceHasDoneTheOperation, 2) {
  for (const bool async_op : {true, false}) {
    simulated_cuda::restart(0);
    const auto group = init_process_group("nccl");
    const torch::Device device = local_device();
    const Tensor sum = torch::ones({100}, device);
    auto spans = std::make_shared<AllReduceSpans>();
    const SpanSubscription subscription(spans);
    std::promise<void> go_on;
    simulated_cuda::enqueue(
        *current_stream(device),
        [held = go_on.get_future().share()] { held.wait(); });
    const int64_t waits = simulated_cuda::counters().host_waits;
    for (int i = 0; i < 3; ++i) {
      const WorkPtr work = all_reduce(sum, {.async_op = async_op});
      if (work) work->wait();
    }
    EXPECT_EQ(simulated_cuda::counters().host_waits, waits);
    EXPECT_EQ(spans->begun(), 3U);
    EXPECT_THAT(spans->ended(), IsEmpty());
    go_on.set_value();
    EXPECT_EQ(sum.sum().item<float>(), 800);
    // The watchdog says that they have ended.
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (spans->ended().size() < 3 &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_THAT(spans->ended(), ElementsAre(1, 2, 3));
  }
}

}  // namespace
}  // namespace lockstep::internal

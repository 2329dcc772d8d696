// Training on several streams of one device: a stream reads what another one
// has computed only afterwards, and memory is not given away while a stream
// uses it.

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal {
namespace {

using testing::append_state;
using testing::bound_of_sums;
using testing::expect_as_on_cpu;
using testing::kDeviceBackend;
using testing::World;
using torch::Tensor;

// Makes another stream current. At both ends the stream that is left is waited
// for, as a user must do.
class OnSideStream {
 public:
  explicit OnSideStream(torch::Device device)
      : before_(current_stream(device)) {
    if (!before_) return;
    side_ = c10::impl::VirtualGuardImpl(device.type())
                .getStreamFromGlobalPool(device);
    await_stream(*side_, *before_);
    guard_.emplace(*side_);
  }
  OnSideStream(const OnSideStream&) = delete;
  OnSideStream& operator=(const OnSideStream&) = delete;
  ~OnSideStream() {
    if (before_) await_stream(*before_, *side_);
  }

 private:
  const std::optional<c10::Stream> before_;
  std::optional<c10::Stream> side_;
  std::optional<c10::StreamGuard> guard_;
};

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    torch::manual_seed(6);
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(10, 10)));
    }
  }
  // Each branch on a stream of its own.
  Tensor forward(const Tensor& x) {
    std::vector<Tensor> outputs;
    for (auto& layer : layers) {
      const OnSideStream side(x.device());
      keep_for_current_stream(x);
      outputs.push_back(layer(x).tanh());
    }
    for (const Tensor& output : outputs) keep_for_current_stream(output);
    return torch::stack(outputs).sum(0);
  }
  std::vector<torch::nn::Linear> layers;
};

enum class Place { everywhere, in_the_loop, in_forward };

std::vector<Tensor> train(Place place, bool views, bool unfreezes,
                          const at::Device& device) {
  std::vector<Tensor> results;
  const auto all = [&] {
    auto net = std::make_shared<BranchesImpl>();
    net->to(device);
    if (unfreezes) net->layers[1]->weight.requires_grad_(false);
    DistributedDataParallel<std::shared_ptr<BranchesImpl>> model(
        net, {.bucket_cap_mb = 4e-4, .gradient_as_bucket_view = views});
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    torch::manual_seed(100 + get_rank());
    for (int step = 0; step < 5; ++step) {
      if (unfreezes && step == 2) net->layers[1]->weight.requires_grad_(true);
      const auto iteration = [&] {
        optimizer.zero_grad(step % 2 == 0);
        const Tensor x = torch::randn({4, 10}).to(device);
        if (step == 3) {
          const auto guard = model.no_sync();
          model(x).square().mean().backward();
        }
        model(x * 2).square().mean().backward();
        append_state(*net, results);
        optimizer.step();
      };
      if (place == Place::in_the_loop) {
        const OnSideStream side(device);
        iteration();
        for (const Tensor& result : results) {
          if (result.defined()) keep_for_current_stream(result);
        }
      } else {
        iteration();
      }
    }
  };
  if (place == Place::everywhere) {
    const OnSideStream side(device);
    all();
  } else {
    all();
  }
  // Gets the memory of whatever was freed above and no stream has kept.
  const Tensor next = torch::full({1000}, 7.0, device);
  return results;
}

WORLD_TEST(Streams, TrainingOnSideStreamsHasTheNumbersOfTheCpu, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        std::vector<Tensor> results;
        for (const Place place :
             {Place::everywhere, Place::in_the_loop, Place::in_forward}) {
          for (const bool views : {true, false}) {
            for (const bool unfreezes : {true, false}) {
              for (Tensor& one : train(place, views, unfreezes, device)) {
                results.push_back(std::move(one));
              }
            }
          }
        }
        return results;
      },
      bound_of_sums(world));
}

// The buckets of a wrapper were written by gradients on one stream and
// published on another, without a wait.
WORLD_TEST(Streams, ABucketFollowsTheStreamThatUsesIt, 1) {
  const auto group = init_process_group(kDeviceBackend);
  const torch::Device device = local_device();
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    simulated_cuda::restart(seed);
    const std::vector<NamedParameter> parameters{
        {"p", torch::zeros({1000}, device)}};
    auto bucket =
        std::make_unique<GradientBucket>(make_bucket(parameters, {0}, group));
    {
      const c10::StreamGuard other(c10::impl::VirtualGuardImpl(device.type())
                                       .getStreamFromGlobalPool(device));
      bucket->use_on_current_stream();
      bucket->flat.add_(1);
    }
    bucket->use_on_current_stream();
    EXPECT_EQ(bucket->flat.sum().item<float>(), 1000) << "seed " << seed;
  }
}

// The memory of a bucket belongs to the stream that made it. When the bucket
// was dropped, that stream got the memory again, which another one still read.
WORLD_TEST(Streams, ADroppedBucketStaysForTheStreamThatReadsIt, 1) {
  const auto group = init_process_group();
  simulated_cuda::restart(0);
  const torch::Device device = local_device();
  const std::vector<NamedParameter> parameters{
      {"p", torch::zeros({1000}, device)}};
  auto bucket =
      std::make_unique<GradientBucket>(make_bucket(parameters, {0}, group));
  bucket->flat.fill_(1);
  std::promise<void> go_on;
  const c10::Stream other = c10::impl::VirtualGuardImpl(device.type())
                                .getStreamFromGlobalPool(device);
  simulated_cuda::enqueue(other,
                          [held = go_on.get_future().share()] { held.wait(); });
  Tensor sum;
  {
    const c10::StreamGuard guard(other);
    bucket->use_on_current_stream();
    sum = bucket->flat + 1;
  }
  bucket.reset();
  // As large as the bucket, so it would get that memory.
  const Tensor next = torch::full({1000}, 7.0, device);
  EXPECT_EQ(next.sum().item<float>(), 7000);  // has been written
  go_on.set_value();
  const c10::StreamGuard guard(other);
  EXPECT_EQ(sum.sum().item<float>(), 2000);
}

// The result of a tensor that is not contiguous is copied back: by the future's
// callback or by isCompleted(), on their stream. wait() waited for NCCL only,
// and not for that copy; and the memory that was copied could be used again
// before.
WORLD_TEST(Streams, WaitWaitsForWhatTheFutureCopies, 2) {
  const auto group = init_process_group(kDeviceBackend);
  const torch::Device device = local_device();
  for (const bool by_future : {true, false}) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      simulated_cuda::restart(seed);
      const Tensor values = torch::ones({50, 40}, device).t();
      WorkPtr work = all_reduce(values, {.async_op = true});
      if (by_future) {
        work->getFuture();
      } else {
        const OnSideStream side(device);
        while (!work->isCompleted()) std::this_thread::yield();
      }
      work->wait();
      const Tensor sum = values + 1;
      work.reset();
      const Tensor next = torch::full({2000}, 7.0, device);
      EXPECT_TRUE(sum.eq(3).all().item<bool>()) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace lockstep::internal

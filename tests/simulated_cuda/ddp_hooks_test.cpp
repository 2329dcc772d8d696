// Communication hooks on devices give the numbers of the CPU, also if they work
// on other streams than backward.

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/ddp/hook_reduction.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal {
namespace {

using testing::append_state;
using testing::expect_as_on_cpu;
using testing::kDeviceBackend;
using testing::World;
using torch::Tensor;

// A hook of a user's own: computes on a stream of its own, and gives its result
// by a continuation.
CommFuture users_hook(GradBucket& bucket) {
  const torch::Device device = bucket.buffer().device();
  std::optional<c10::Stream> side;
  if (const auto current = current_stream(device)) {
    side = c10::impl::VirtualGuardImpl(device.type())
               .getStreamFromGlobalPool(device);
    await_stream(*side, *current);
  }
  const c10::OptionalStreamGuard guard(side);
  const torch::NoGradGuard no_grad;
  const Tensor half = bucket.buffer() / 2;
  const WorkPtr work = all_reduce(half, {.async_op = true});
  return work->getFuture()->then(
      [](c10::ivalue::Future& ended) -> c10::IValue {
        const torch::NoGradGuard here;
        return ended.value().toTensorVector()[0] * 2 / get_world_size();
      },
      c10::TensorType::get());
}

struct Named {
  std::string name;
  std::function<CommHook()> make;
};

std::vector<Named> hooks() {
  const auto power_sgd = [](bool by_shape, bool warm) {
    return std::make_shared<PowerSGDState>(
        PowerSGDOptions{.matrix_approximation_rank = 2,
                        .start_power_sgd_iter = 2,
                        .warm_start = warm,
                        .min_compression_rate = 0.5,
                        .batch_tensors_with_same_shape = by_shape});
  };
  return {
      {"allreduce", [] { return allreduce_hook(); }},
      {"fp16", [] { return fp16_compress_hook(); }},
      {"bf16", [] { return bf16_compress_hook(); }},
      {"fp16 around allreduce",
       [] { return fp16_compress_wrapper(allreduce_hook()); }},
      {"bf16 around PowerSGD",
       [=] {
         return bf16_compress_wrapper(power_sgd_hook(power_sgd(false, true)));
       }},
      {"PowerSGD", [=] { return power_sgd_hook(power_sgd(false, true)); }},
      {"PowerSGD by shape",
       [=] { return power_sgd_hook(power_sgd(true, false)); }},
      {"batched PowerSGD",
       [=] { return batched_power_sgd_hook(power_sgd(false, true)); }},
      {"post-local SGD",
       [] {
         return post_local_sgd_hook(
             std::make_shared<PostLocalSGDState>(PostLocalSGDOptions{
                 .subgroup = default_group(), .start_local_sgd_iter = 2}));
       }},
      {"quantization per tensor", [] { return quantization_pertensor_hook(); }},
      {"quantization per channel",
       [] { return quantization_perchannel_hook({}, 32); }},
      {"noop", [] { return noop_hook(); }},
      {"a user's", [] { return CommHook(users_hook); }},
  };
}

torch::nn::Sequential layers_of_one_shape() {
  torch::manual_seed(4);
  using torch::nn::Linear;
  return torch::nn::Sequential(
      Linear(12, 12), torch::nn::Tanh(), Linear(12, 12), torch::nn::Tanh(),
      Linear(12, 12), torch::nn::Tanh(), Linear(12, 3));
}

std::vector<Tensor> train(const CommHook& hook, bool views,
                          const at::Device& device) {
  torch::nn::Sequential net = layers_of_one_shape();
  net->to(device);
  DistributedDataParallel<torch::nn::Sequential> model(
      net, {.bucket_cap_mb = 7e-4, .gradient_as_bucket_view = views});
  model.register_comm_hook(hook);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  torch::manual_seed(100 + get_rank());
  std::vector<Tensor> results;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const Tensor x = torch::randn({4, 12}).to(device);
    model(x).square().mean().backward();
    append_state(*net, results);
    optimizer.step();
  }
  return results;
}

WORLD_TEST(DdpHooksOnDevices, GiveTheNumbersOfTheCpu, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        std::vector<Tensor> results;
        for (const auto& [name, make] : hooks()) {
          for (const bool views : {true, false}) {
            for (Tensor& one : train(make(), views, device)) {
              results.push_back(std::move(one));
            }
          }
        }
        return results;
      },
      0);
}

// advance() made the stream of backward wait for the first bucket's hook, so
// that nothing was computed while gradients were on their way.
WORLD_TEST(DdpHooksOnDevices, BackwardGoesOnWhileAHookWorks, 1) {
  const auto group = init_process_group(kDeviceBackend);
  simulated_cuda::restart(0);
  const torch::Device device = local_device();
  const std::vector<NamedParameter> parameters{
      {"p", torch::zeros({3}, device)}};
  const std::vector<GradientBucket> buckets{
      make_bucket(parameters, {0}, group)};
  const c10::impl::VirtualGuardImpl accelerator(device.type());
  const c10::Stream side = accelerator.getStreamFromGlobalPool(device);
  std::promise<void> go_on;
  const auto hook = [&](GradBucket& bucket) {
    simulated_cuda::enqueue(
        side, [held = go_on.get_future().share()] { held.wait(); });
    const c10::StreamGuard guard(side);
    return completed_future(bucket.buffer());
  };
  const auto reduction = hook_buckets(buckets, parameters, hook, group);
  reduction->begin(1, 1);
  reduction->publish(0);
  reduction->advance();
  const Tensor more = torch::ones({3}, device) * 2;
  c10::Event computed(device.type());
  computed.record(accelerator.getStream(device));
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (!computed.query() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(computed.query());
  go_on.set_value();
  reduction->finish();
}

}  // namespace
}  // namespace lockstep::internal

// Options that turn a part of DistributedDataParallel on or off, and what must
// not be used together with optimizers in backward; on shared memory and on
// Gloo.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_both_backends;
using ::testing::ThrowsMessage;
using testing::World;

// A parameter and a buffer that begin with other values on each rank; the
// gradient is x.
struct RanksOwnImpl : torch::nn::Module {
  explicit RanksOwnImpl(int rank) {
    factor = register_parameter("factor", torch::full({2}, rank + 1.0));
    seen = register_buffer("seen", torch::full({1}, 1.0 * rank));
  }
  torch::Tensor forward(double x) { return (factor * x).sum(); }
  torch::Tensor factor;
  torch::Tensor seen;
};
TORCH_MODULE(RanksOwn);

double first_number(const torch::Tensor& tensor) {
  return tensor.flatten()[0].item<double>();
}

WORLD_TEST(DdpInitSync, WithoutItParametersStayAndGradientsAreAveraged, 1, 2) {
  on_both_backends([&] {
    RanksOwn net(world.rank);
    DistributedDataParallel<RanksOwn> model(net, {.init_sync = false});
    const double own = world.rank + 1;
    EXPECT_EQ(first_number(net->factor), own);
    EXPECT_EQ(first_number(net->seen), world.rank);
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    for (int step = 1; step <= 3; ++step) {
      optimizer.zero_grad();
      model(2.0 * (world.rank + 1)).backward();
      const double mean = world.size + 1;  // the mean of 2, 4, ...
      EXPECT_EQ(first_number(net->factor.grad()), mean);
      optimizer.step();
      EXPECT_EQ(first_number(net->factor), own - step * 0.5 * mean);
      EXPECT_EQ(first_number(net->seen), 0) << "forward sends buffers as ever";
    }
  });
}

WORLD_TEST(DdpInitSync, WithItAllBeginAsRankZero, 1, 2) {
  on_both_backends([&] {
    RanksOwn net(world.rank);
    DistributedDataParallel<RanksOwn> model(net, {.init_sync = true});
    EXPECT_EQ(first_number(net->factor), 1);
    EXPECT_EQ(first_number(net->seen), 0);
  });
}

struct BufferSwitches {
  bool broadcast_buffers;
  std::optional<bool> forward_sync_buffers;
  bool constructor_sends;
  bool forward_sends;
};

WORLD_TEST(DdpForwardBuffers, TravelAsForwardSyncBuffersSays, 1, 2) {
  const std::vector<BufferSwitches> table{
      {true, std::nullopt, true, true},    {true, true, true, true},
      {true, false, true, false},          {false, true, true, true},
      {false, std::nullopt, false, false}, {false, false, true, false}};
  on_both_backends([&] {
    for (size_t row = 0; row < table.size(); ++row) {
      SCOPED_TRACE(row);
      const auto& switches = table[row];
      RanksOwn net(world.rank);
      DistributedDataParallel<RanksOwn> model(
          net, {.broadcast_buffers = switches.broadcast_buffers,
                .forward_sync_buffers = switches.forward_sync_buffers});
      EXPECT_EQ(first_number(net->seen),
                switches.constructor_sends ? 0 : world.rank);
      EXPECT_EQ(model.get_ddp_logging_data().broadcast_buffers,
                switches.forward_sends);
      for (int step = 1; step <= 2; ++step) {
        net->seen.fill_(10 * step + world.rank);
        auto loss = model(1.0);
        EXPECT_EQ(first_number(net->seen),
                  10 * step + (switches.forward_sends ? 0 : world.rank));
        loss.backward();
      }
    }
  });
}

std::array<int64_t, 8> times_of(const DDPLoggingData& data) {
  return {data.forward_compute_time,
          data.backward_compute_time,
          data.backward_comm_time,
          data.backward_compute_comm_overlap_time,
          data.avg_forward_compute_time,
          data.avg_backward_compute_time,
          data.avg_backward_comm_time,
          data.avg_backward_compute_comm_overlap_time};
}

// Returns for iterations 0, 1, ... whether the reported times changed. They are
// the nanoseconds of four spans, which never repeat.
template <typename Model>
std::vector<bool> sampled_iterations(Model& model, int count) {
  std::vector<bool> sampled;
  auto before = times_of(model.get_ddp_logging_data());
  for (int i = 0; i < count; ++i) {
    model(1.0).backward();
    const auto data = model.get_ddp_logging_data();
    EXPECT_EQ(data.iteration, i + 1);
    const auto after = times_of(data);
    sampled.push_back(after != before);
    before = after;
  }
  return sampled;
}

std::vector<bool> first_ten_and_one_in(int rate, int count) {
  std::vector<bool> wanted;
  for (int i = 0; i < count; ++i) wanted.push_back(i < 10 || i % rate == 0);
  return wanted;
}

WORLD_TEST(DdpSampleRate, BehindTheFirstTenOneIterationInSoManyIsTimed, 1, 2) {
  on_both_backends([&] {
    for (int rate : {1, 4}) {
      DistributedDataParallel<RanksOwn> model(RanksOwn(world.rank));
      model.set_ddp_runtime_logging_sample_rate(rate);
      EXPECT_EQ(sampled_iterations(model, 22), first_ten_and_one_in(rate, 22));
    }
  });
}

WORLD_TEST(DdpSampleRate, IsOneInAHundredUnlessToldOtherwise, 1) {
  on_both_backends([&] {
    DistributedDataParallel<RanksOwn> model(RanksOwn(world.rank));
    EXPECT_EQ(sampled_iterations(model, 102), first_ten_and_one_in(100, 102));
  });
}

WORLD_TEST(DdpSampleRate, BelowOneIsRefused, 1) {
  on_both_backends([&] {
    DistributedDataParallel<RanksOwn> model(RanksOwn(world.rank));
    for (int rate : {0, -3}) {
      EXPECT_THAT([&] { model.set_ddp_runtime_logging_sample_rate(rate); },
                  ThrowsMessage<std::invalid_argument>(
                      AllOf(HasSubstr("sample rate is " + std::to_string(rate)),
                            HasSubstr("allowed is 1 or more"))));
    }
    model(1.0).backward();
  });
}

std::unique_ptr<torch::optim::Optimizer> make_plain_sgd(
    std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.1);
}

// A refused call leaves the wrapper unchanged: gradients are averaged and stay.
void expect_refused_in_backward(
    const World& world, torch::nn::Linear net,
    DistributedDataParallel<torch::nn::Linear>& model,
    const std::string& words) {
  EXPECT_THAT(
      [&] { model.apply_optimizer_in_backward(make_plain_sgd); },
      ThrowsMessage<std::logic_error>(
          AllOf(HasSubstr("apply_optimizer_in_backward: "), HasSubstr(words))));
  const auto weight = net->weight.detach().clone();
  model(torch::full({1, 2}, 2.0 * (world.rank + 1))).sum().backward();
  EXPECT_TRUE(net->weight.equal(weight)) << "was stepped";
  ASSERT_TRUE(net->weight.grad().defined());
  EXPECT_EQ(first_number(net->weight.grad()), world.size + 1);
}

WORLD_TEST(DdpOptimizerInBackward, IsRefusedWithLowPrecisionParameters, 1, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(
        net,
        {.mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16}});
    expect_refused_in_backward(world, net, model,
                               "mixed_precision.param_dtype");
  });
}

WORLD_TEST(DdpOptimizerInBackward, IsRefusedBesideACommHook, 1, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(net);
    model.register_comm_hook(allreduce_hook());
    expect_refused_in_backward(world, net, model, "a communication hook");

    DistributedDataParallel<torch::nn::Linear> stepping(
        torch::nn::Linear(2, 1));
    stepping.apply_optimizer_in_backward(make_plain_sgd);
    EXPECT_THAT([&] { stepping.register_comm_hook(allreduce_hook()); },
                ThrowsMessage<std::logic_error>(
                    HasSubstr("optimizers step in backward")));
  });
}

WORLD_TEST(DdpOptimizerInBackward, IsRefusedBesideAShardedOptimizer, 1, 2) {
  using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(net);
    Zero sharded(model, torch::optim::SGDOptions(0.1));
    EXPECT_THAT(
        [&] { model.apply_optimizer_in_backward(make_plain_sgd); },
        ThrowsMessage<std::logic_error>(HasSubstr("a sharded optimizer")));

    torch::nn::Linear other(2, 1);
    DistributedDataParallel<torch::nn::Linear> stepping(other);
    stepping.apply_optimizer_in_backward(make_plain_sgd);
    const auto shard = [&] { Zero(stepping, torch::optim::SGDOptions(0.1)); };
    EXPECT_THAT(shard, ThrowsMessage<std::invalid_argument>(
                           HasSubstr("optimizers in backward already")));
    // Both wrappers still train as before.
    const auto before = other->bias.detach().clone();
    stepping(torch::ones({1, 2})).sum().backward();
    EXPECT_FALSE(other->bias.grad().defined());
    EXPECT_NEAR(first_number(before - other->bias), 0.1, 1e-6);
    const auto whole = net->bias.detach().clone();
    model(torch::ones({1, 2})).sum().backward();
    sharded.step();
    EXPECT_NEAR(first_number(whole - net->bias), 0.1, 1e-6);
  });
}

}  // namespace
}  // namespace lockstep::internal

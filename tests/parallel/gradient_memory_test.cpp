// Whose memory a large gradient is: what users hold stays theirs.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"

namespace lockstep {
namespace {

using testing::World;
using torch::nn::Linear;
using torch::nn::Sequential;

constexpr int64_t kWidth = 256;  // a weight's gradient: 256 KiB

torch::Tensor batch(int rank, int64_t rows) {
  torch::manual_seed(50 + rank);
  return torch::randn({rows, kWidth}) / 16;
}

Sequential two_layers() {
  torch::manual_seed(1);
  return Sequential(Linear(kWidth, kWidth), torch::nn::Tanh(),
                    Linear(kWidth, kWidth));
}

// Of one rank's batch, by this rank alone.
std::vector<torch::Tensor> gradients(Sequential& net, int rank, int64_t rows) {
  return torch::autograd::grad({net->forward(batch(rank, rows)).sum()},
                               net->parameters());
}

void expect_averages(Sequential& net, int size, int64_t rows) {
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    auto mean = torch::zeros_like(net->parameters()[i]);
    for (int rank = 0; rank < size; ++rank) {
      mean += gradients(net, rank, rows)[i] / size;
    }
    EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), mean, 1e-4, 1e-6))
        << "parameter " << i;
  }
}

WORLD_TEST(GradientMemory, GradientsThatStayAreAddedTo, 2) {
  auto group = init_process_group("lockstep");
  auto net = two_layers();
  DistributedDataParallel<Sequential> model(net);
  for (int step = 0; step < 3; ++step) {
    net->zero_grad(/*set_to_none=*/false);
    model(batch(world.rank, 32)).sum().backward();
    expect_averages(net, world.size, 32);
  }
  model(batch(world.rank, 32)).sum().backward();
  for (auto& parameter : net->parameters()) parameter.mutable_grad().div_(2);
  expect_averages(net, world.size, 32);
}

// The gradient of the second layer's input is as large as that of its weight
// and is needed when that is ready.
WORLD_TEST(GradientMemory, ActivationsMayBeAsLargeAsWeights, 2) {
  auto group = init_process_group("lockstep");
  auto net = two_layers();
  DistributedDataParallel<Sequential> model(net);
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    model(batch(world.rank, kWidth)).sum().backward();
    expect_averages(net, world.size, kWidth);
  }
}

WORLD_TEST(GradientMemory, WhatAHookKeepsStaysAsItWas, 2) {
  auto group = init_process_group("lockstep");
  auto net = two_layers();
  DistributedDataParallel<Sequential> model(net);
  std::vector<torch::Tensor> kept;
  auto weight = net->parameters()[2];
  weight.register_hook([&](const at::Tensor& grad) { kept.push_back(grad); });
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    kept.clear();
    model(batch(world.rank, 32)).sum().backward();
    const auto of_this_rank = kept.at(0);
    expect_averages(net, world.size, 32);
    EXPECT_TRUE(torch::allclose(of_this_rank, gradients(net, world.rank, 32)[2],
                                1e-4, 1e-6));
  }
}

WORLD_TEST(GradientMemory, GradientsThatAreAskedForStayTheCallers, 2) {
  auto group = init_process_group("lockstep");
  auto net = two_layers();
  DistributedDataParallel<Sequential> model(net);
  std::vector<std::vector<torch::Tensor>> asked;
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    auto loss = model(batch(world.rank, 32)).sum();
    asked.push_back(torch::autograd::grad({loss}, net->parameters(), {},
                                          /*retain_graph=*/true));
    loss.backward();
    expect_averages(net, world.size, 32);
  }
  for (const auto& of_a_step : asked) {
    EXPECT_TRUE(torch::allclose(of_a_step[0], gradients(net, world.rank, 32)[0],
                                1e-4, 1e-6));
  }
}

WORLD_TEST(GradientMemory, KeptGradientsOutliveModelAndGroup, 2) {
  torch::Tensor kept;
  {
    auto group = init_process_group("lockstep");
    auto net = two_layers();
    DistributedDataParallel<Sequential> model(net);
    auto loss = model(batch(world.rank, 32)).sum();
    kept = torch::autograd::grad({loss}, {net->parameters()[0]})[0];
  }
  auto net = two_layers();
  EXPECT_TRUE(
      torch::allclose(kept, gradients(net, world.rank, 32)[0], 1e-4, 1e-6));
}

WORLD_TEST(GradientMemory, ConvolutionsTrain, 2) {
  auto group = init_process_group("lockstep");
  torch::manual_seed(1);
  torch::nn::Conv2d net(torch::nn::Conv2dOptions(64, 64, 3));
  DistributedDataParallel<torch::nn::Conv2d> model(net);
  auto images = [](int rank) {
    torch::manual_seed(rank);
    return torch::randn({4, 64, 8, 8}) / 16;
  };
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    model(images(world.rank)).square().sum().backward();
    auto mean = torch::zeros_like(net->weight);
    for (int rank = 0; rank < world.size; ++rank) {
      mean += torch::autograd::grad({net->forward(images(rank)).square().sum()},
                                    {net->weight})[0] /
              world.size;
    }
    EXPECT_TRUE(torch::allclose(net->weight.grad(), mean, 1e-3, 1e-5)) << step;
  }
}

WORLD_TEST(GradientMemory, AJoinedRankLeavesWhatIsKeptAlone, 2) {
  auto group = init_process_group("lockstep");
  auto net = two_layers();
  DistributedDataParallel<Sequential> model(net);
  torch::Tensor kept;
  model.join([&] {
    for (int step = 0; step < 1 + 2 * world.rank; ++step) {
      net->zero_grad();
      auto loss = model(batch(world.rank, 32)).sum();
      if (step == 0) {
        kept = torch::autograd::grad({loss}, {net->parameters()[0]}, {},
                                     /*retain_graph=*/true)[0];
      }
      loss.backward();
    }
  });
  EXPECT_TRUE(
      torch::allclose(kept, gradients(net, world.rank, 32)[0], 1e-4, 1e-6));
}

}  // namespace
}  // namespace lockstep

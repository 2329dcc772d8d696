// Exceptions in the middle of a backward, on all ranks and on one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <string>

#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/rank_averages.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::on_both_backends;
using ::testing::ThrowsMessage;
using testing::World;
using torch::Tensor;
using testing::averages;
using testing::expect_gradients;
using testing::kIn;
using testing::rows;

// Throws in backward where `fails` says so.
struct Fragile : torch::autograd::Function<Fragile> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, bool fails) {
    context->saved_data["fails"] = fails;
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list grads) {
    if (context->saved_data["fails"].toBool()) {
      throw std::runtime_error("this backward is fragile");
    }
    return {grads[0], Tensor()};
  }
};

struct FragileNetImpl : torch::nn::Module {
  FragileNetImpl() {
    torch::manual_seed(9);
    first = register_module("first", torch::nn::Linear(kIn, 4));
    last = register_module("last", torch::nn::Linear(4, 2));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    return last(Fragile::apply(first(x), fails));
  }
  bool fails = false;
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(FragileNet);

WORLD_TEST(DdpExceptions, BackwardsThatThrewAreForgotten, 2, 3) {
  on_both_backends([&] {
    FragileNet net;
    DistributedDataParallel<FragileNet> model(net, {.bucket_cap_mb = 1e-5});
    const auto parameters = net->parameters();
    for (int step = 0; step < 5; ++step) {
      net->fails = step % 2 == 1;
      net->zero_grad();
      auto loss = model(rows(world.rank, step)).square().sum();
      if (net->fails) {
        EXPECT_THAT(
            [&] { loss.backward({}, /*retain_graph=*/true); },
            ThrowsMessage<std::runtime_error>(HasSubstr("is fragile")));
        // The plain module in between.
        net->fails = false;
        net->zero_grad();
        net->forward(rows(7)).sum().backward();
        net->zero_grad();
        loss = model(rows(world.rank, step)).square().sum();
      }
      loss.backward();
      expect_gradients(
          parameters,
          averages(world.size, parameters,
                   [&](int rank) {
                     return net->forward(rows(rank, step)).square().sum();
                   }),
          "around exceptions");
    }
  });
}

// Its peers were left to wait for their deadline, or averaged two iterations.
WORLD_TEST(DdpExceptions, PeersOfABackwardThatThrewAreToldAtOnce, 2, 3) {
  auto group = init_process_group("lockstep", {.timeout = std::chrono::seconds(
                                                   50)});
  FragileNet net;
  DistributedDataParallel<FragileNet> model(net);
  const auto parameters = net->parameters();
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    net->fails = step % 2 == 1 && world.rank == world.size - 1;
    auto loss = model(rows(world.rank, step)).square().sum();
    if (step % 2 == 1) {
      const auto begun = std::chrono::steady_clock::now();
      const std::string words =
          net->fails ? std::string("is fragile")
                     : "rank " + std::to_string(world.size - 1);
      std::string said;
      try {
        loss.backward();
      } catch (const std::exception& error) {
        said = error.what();
      }
      EXPECT_THAT(said, HasSubstr(words));
      if (!net->fails) {
        EXPECT_THAT(said, HasSubstr("given up the iteration"));
      }
      // Long before the group's deadline.
      EXPECT_LT(std::chrono::steady_clock::now() - begun,
                std::chrono::seconds(25));
      continue;
    }
    loss.backward();
    expect_gradients(
        parameters,
        averages(world.size, parameters,
                 [&](int rank) {
                   return net->forward(rows(rank, step)).square().sum();
                 }),
        "after one rank's exception");
  }
}

}  // namespace
}  // namespace lockstep

// Users keep, rebind and resize .grad, as they do without a wrapper.
// Regression: a gradient that a program kept over zero_grad() and the next
// backward was overwritten, and one that was rebound by set_data() was never
// averaged again.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/optim/adam.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/rank_averages.h"

namespace lockstep::internal::testing {
namespace {

using Wrapped = DistributedDataParallel<torch::nn::Sequential>;

// Has one weight of a size that is reduced where backward computes it.
torch::nn::Sequential net_with_a_large_weight() {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(kIn, 100), torch::nn::Tanh(),
                            torch::nn::Linear(100, 100), torch::nn::Tanh(),
                            torch::nn::Linear(100, 2));
  net->to(torch::kDouble);
  return net;
}

WORLD_TEST(DdpKeptGradients, KeepTheirValues, 2, 3) {
  on_both_backends([&] {
    for (const bool views : {true, false}) {
      SCOPED_TRACE(views);
      auto net = net_with_a_large_weight();
      Wrapped model(net, {.gradient_as_bucket_view = views});
      const auto parameters = net->parameters();
      std::vector<std::pair<Tensor, Tensor>> kept;  // with the value it had
      for (int step = 0; step < 6; ++step) {
        net->zero_grad();
        model(rows(world.rank, step)).square().sum().backward();
        expect_gradients(parameters,
                         averages(world.size, parameters, loss_of(net, step)),
                         "while others are kept");
        for (const auto& [gradient, value] : kept) {
          EXPECT_TRUE(gradient.equal(value)) << "in step " << step;
        }
        // Each step keeps them in another way; the last keeps nothing new.
        for (const auto& parameter : parameters) {
          const auto& gradient = parameter.grad();
          const std::vector<Tensor> ways{gradient, gradient.detach(),
                                         gradient.variable_data(),
                                         gradient.flatten()};
          if (step < 4) kept.emplace_back(ways[step], ways[step].clone());
        }
      }
    }
  });
}

// A copy for each parameter and step would cost more than the reduction.
WORLD_TEST(DdpKeptGradients, AreMadeAnewOnlyIfTheyAreHeld, 2) {
  on_both_backends([&] {
    for (const bool is_sharded : {false, true}) {
      SCOPED_TRACE(is_sharded);
      auto net = small_net();
      Wrapped model(net);
      const auto parameters = net->parameters();
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (is_sharded) {
        optimizer = std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
            model, optim::AdamWOptions{});
      } else {
        optimizer = std::make_unique<optim::AdamW>(parameters);
      }
      std::vector<const void*> before;
      for (int step = 0; step < 5; ++step) {
        optimizer->zero_grad();
        model(rows(world.rank, step)).square().sum().backward();
        std::vector<const void*> now;
        for (const auto& parameter : parameters) {
          now.push_back(parameter.grad().unsafeGetTensorImpl());
        }
        if (step > 1) {  // after the rebuilding
          EXPECT_EQ(now, before) << step;
        }
        before = now;
        optimizer->step();
      }
    }
  });
}

WORLD_TEST(DdpKeptGradients, MayBeReboundAndResized, 2, 3) {
  const std::vector<
      std::pair<std::string, std::function<void(const Tensor& gradient)>>>
      changes{
          {"set_data",
           [](const Tensor& gradient) {
             gradient.set_data(torch::ones_like(gradient));
           }},
          {"set_",
           [](const Tensor& gradient) {
             gradient.set_(torch::ones_like(gradient));
           }},
          {"larger",
           [](const Tensor& gradient) {
             gradient.resize_({gradient.numel() + 100});
           }},
          {"smaller", [](const Tensor& gradient) { gradient.resize_({1}); }},
          {"transposed", [](const Tensor& gradient) { gradient.t_(); }},
          {"requires grad",
           [](const Tensor& gradient) { gradient.requires_grad_(); }},
      };
  on_both_backends([&] {
    for (const bool views : {true, false}) {
      for (const auto& [name, change] : changes) {
        SCOPED_TRACE(name + (views ? ", views" : ""));
        auto net = net_with_a_large_weight();
        Wrapped model(net, {.gradient_as_bucket_view = views});
        const auto parameters = net->parameters();
        for (int step = 0; step < 4; ++step) {
          net->zero_grad();
          model(rows(world.rank, step)).square().sum().backward();
          expect_gradients(parameters,
                           averages(world.size, parameters, loss_of(net, step)),
                           "after changes");
          for (const auto& parameter : parameters) change(parameter.grad());
        }
      }
    }
  });
}

WORLD_TEST(DdpKeptGradients, AccumulateOntoWhatTheyWereReboundTo, 2) {
  on_both_backends([&] {
    auto net = net_with_a_large_weight();
    Wrapped model(net);
    const auto parameters = net->parameters();
    for (int step = 0; step < 4; ++step) {
      auto expected = averages(world.size, parameters, loss_of(net, step));
      for (size_t i = 0; step > 0 && i < parameters.size(); ++i) {
        const auto& gradient = parameters[i].grad();
        gradient.set_data(torch::full_like(gradient, world.rank + 1));
        expected[i] += (world.size + 1) / 2.0;  // the ranks' mean
      }
      model(rows(world.rank, step)).square().sum().backward();
      expect_gradients(parameters, expected, "onto what was rebound");
    }
  });
}

WORLD_TEST(DdpKeptGradients, OfAnotherParameterAreLeftAlone, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();  // [5,3] [5] [2,5] [2]
    for (int step = 0; step < 3; ++step) {
      auto expected = averages(world.size, parameters, loss_of(net, step));
      if (step > 0) {
        // The gradient of one is a part of another's.
        const auto& other = parameters[0].grad();
        parameters[3].mutable_grad() = other.flatten().slice(0, 0, 2);
        expected[3] += other.flatten().slice(0, 0, 2);
        expected[0] += other;
        for (size_t i : {1, 2}) expected[i] += parameters[i].grad();
      }
      model(rows(world.rank, step)).square().sum().backward();
      expect_gradients(parameters, expected, "of another");
    }
  });
}

WORLD_TEST(DdpKeptGradients, KeepTheirValuesWhileOthersTrainOn, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    Gradients kept;
    Gradients values;
    model.join([&] {
      for (int step = 0; step < 3 + world.rank; ++step) {
        net->zero_grad();
        model(rows(world.rank, step)).square().sum().backward();
        if (step != 2) continue;
        for (const auto& parameter : parameters) {
          kept.push_back(parameter.grad());
          values.push_back(parameter.grad().clone());
        }
      }
    });
    for (size_t i = 0; i < kept.size(); ++i) {
      EXPECT_TRUE(kept[i].equal(values[i])) << i;
    }
  });
}

}  // namespace
}  // namespace lockstep::internal::testing

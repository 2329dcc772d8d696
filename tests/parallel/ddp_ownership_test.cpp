// Which backward passes a wrapper averages, and which it leaves alone. Compares
// with gradients of plain modules, on shared memory and on Gloo.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/rank_averages.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Wrapped = DistributedDataParallel<torch::nn::Sequential>;

WORLD_TEST(DdpOwnership, BackwardOfThePlainModuleIsNotAveraged, 2, 3) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      model(rows(world.rank, step)).square().sum().backward();
      expect_gradients(parameters,
                       averages(world.size, parameters, loss_of(net, step)),
                       "of the wrapper");
      net->zero_grad();
      loss_of(net, step)(world.rank).backward();
      expect_gradients(parameters,
                       gradients(loss_of(net, step)(world.rank), parameters),
                       "of the module");
    }
  });
}

// The probes are a saliency map and a look at gradients. Regression: one on
// rank 0 paired its iteration with the next one of its peers, for ever.
WORLD_TEST(DdpOwnership, ProbesOnOneRankChangeNothing, 2, 3) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    auto probe = [&] {
      if (world.rank != 0) return;
      net->forward(rows(77)).sum().backward();
      net->zero_grad();
    };
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      probe();
      auto output = model(rows(world.rank, step));
      probe();  // between the wrapper's forward and its backward
      output.square().sum().backward();
      expect_gradients(parameters,
                       averages(world.size, parameters, loss_of(net, step)),
                       "with probes");
      probe();
    }
  });
}

// The first node that a thread makes has the number 0. Regression: the nodes
// that add up the replicas' gradients had it, too.
WORLD_TEST(DdpOwnership, BackwardOfReplicasIsNotAveraged, 2) {
  on_both_backends([&] {
    std::thread([&] {
      auto net = small_net();
      Wrapped model(net);
      DataParallel<torch::nn::Sequential> replicas(
          net, {.device_ids = {at::Device("cpu:0"), at::Device("cpu:1")}});
      const auto parameters = net->parameters();
      auto loss = model(rows(world.rank)).square().sum();
      replicas.forward(rows(world.rank)).square().sum().backward();
      expect_gradients(parameters,
                       gradients(loss_of(net)(world.rank), parameters),
                       "of the replicas");
    }).join();
  });
}

// The gradients of the support set are taken by grad(), and the query's loss is
// computed without the module. Regression: it was not averaged.
WORLD_TEST(DdpOwnership, FirstOrderMetaLearningIsAveraged, 2, 3) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    const auto query = [&](const Tensor& support, int rank, int step) {
      auto fast = torch::autograd::grad({support}, parameters);
      for (size_t i = 0; i < fast.size(); ++i) {
        fast[i] = parameters[i] - 0.1 * fast[i];
      }
      const auto hidden =
          torch::linear(rows(rank, step + 10), fast[0], fast[1]).tanh();
      return torch::linear(hidden, fast[2], fast[3]).square().sum();
    };
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const auto expected = averages(world.size, parameters, [&](int rank) {
        return query(loss_of(net, step)(rank), rank, step);
      });
      query(model(rows(world.rank, step)).square().sum(), world.rank, step)
          .backward();
      expect_gradients(parameters, expected, "of the query");
    }
    // Only the next backward averages.
    net->zero_grad();
    loss_of(net)(world.rank).backward();
    expect_gradients(parameters,
                     gradients(loss_of(net)(world.rank), parameters),
                     "of the module");
  });
}

WORLD_TEST(DdpOwnership, GradIsNotABackward, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      auto loss = model(rows(world.rank, step)).square().sum();
      const auto asked = gradients(loss, parameters);
      for (const auto& parameter : parameters) {
        EXPECT_FALSE(parameter.grad().defined());
      }
      if (world.rank == 0) gradients(loss, parameters);
      const auto own = gradients(loss_of(net, step)(world.rank), parameters);
      EXPECT_TRUE(torch::allclose(asked[0], own[0], 1e-10, 1e-12));
      loss.backward();
      expect_gradients(parameters,
                       averages(world.size, parameters, loss_of(net, step)),
                       "after grad()");
    }
  });
}

// Uses a penalty on the gradient of the input; its own backward does not pass
// through any node of forward.
WORLD_TEST(DdpOwnership, BackwardOfDerivativesIsAveraged, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    auto penalty = [](const Tensor& output, const Tensor& input) {
      return torch::autograd::grad({output.square().sum()}, {input}, {}, true,
                                   /*create_graph=*/true)[0]
          .square()
          .sum();
    };
    auto plain = [&](int rank) {
      auto input = rows(rank).requires_grad_();
      return penalty(net->forward(input), input);
    };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      auto input = rows(world.rank).requires_grad_();
      auto output = model(input);
      penalty(output, input).backward();
      expect_gradients(parameters, averages(world.size, parameters, plain),
                       "of the penalty");
    }
  });
}

WORLD_TEST(DdpOwnership, EachForwardDecidesForItsBackward, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    auto own = [&](int step) {
      return gradients(loss_of(net, step)(world.rank), parameters);
    };
    auto mean = [&](int step) {
      return averages(world.size, parameters, loss_of(net, step));
    };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      auto synchronised = model(rows(world.rank, 1)).square().sum();
      Tensor local;
      {
        auto guard = model.no_sync();
        local = model(rows(world.rank, 2)).square().sum();
      }
      synchronised.backward();
      expect_gradients(parameters, mean(1), "first forward");
      local.backward();
      auto expected = mean(1);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += own(2)[i];
      expect_gradients(parameters, expected, "second forward");

      // First both in one backward; then out of order, over a retained graph.
      net->zero_grad();
      {
        auto guard = model.no_sync();
        local = model(rows(world.rank, 2)).square().sum();
      }
      auto other = model(rows(world.rank, 3)).square().sum();
      synchronised = model(rows(world.rank, 1)).square().sum();
      (synchronised + local).backward();
      expected = mean(1);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += mean(2)[i];
      expect_gradients(parameters, expected, "both");
      other.backward({}, /*retain_graph=*/true);
      other.backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] += 2 * mean(3)[i];
      }
      expect_gradients(parameters, expected, "retained");
    }
  });
}

// Regression: Autocast casts each parameter once while a guard lives (of Linear
// the bias, as its weight is transposed first), so the casts of one forward are
// nodes of all others, and rank 0 averaged its probes.
WORLD_TEST(DdpOwnership, ForwardsUnderOneAutocastGuardAreToldApart, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(kIn, 2);
    DistributedDataParallel<torch::nn::Linear> model(net);
    const auto x = torch::full({1, kIn}, world.rank + 1.0F);
    const auto expect_gradient = [&](double expected) {
      EXPECT_DOUBLE_EQ(net->weight.grad()[0][0].item<double>(), expected);
      net->zero_grad();
    };
    for (int step = 0; step < 3; ++step) {
      const Autocast mixed(at::kCPU, at::kBFloat16);
      const auto output = model(x);
      if (world.rank == 0) {
        {
          const auto guard = model.no_sync();
          model(x).sum().backward();
        }
        expect_gradient(1);
        net->forward(x).sum().backward();
        expect_gradient(1);
      }
      output.sum().backward();
      expect_gradient(1.5);
    }
  });
}

// Regression: while another forward waited for its backward, the one under
// no_sync() was refused. With Autocast it was averaged.
WORLD_TEST(DdpOwnership, AModelOfOneOperationTellsItsForwardsApart, 2) {
  on_both_backends([&] {
    struct DotImpl : torch::nn::Module {
      DotImpl() { weight = register_parameter("weight", torch::ones({2})); }
      Tensor forward(const Tensor& x) { return torch::matmul(weight, x); }
      Tensor weight;
    };
    auto net = std::make_shared<DotImpl>();
    DistributedDataParallel<std::shared_ptr<DotImpl>> model(net);
    const auto x = torch::full({2}, world.rank + 1.0F);
    for (const bool casts : {false, true}) {
      const Autocast mixed(at::kCPU, at::kBFloat16, casts);
      const auto output = model(x);
      {
        const auto guard = model.no_sync();
        model(x).backward();
      }
      EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(), world.rank + 1.0);
      net->zero_grad();
      output.backward();
      EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(), 1.5);
      net->zero_grad();
    }
  });
}

// A cast of a parameter looks like those that Autocast keeps.
WORLD_TEST(DdpOwnership, AModelThatIsACastIsAveraged, 2) {
  on_both_backends([&] {
    struct CastImpl : torch::nn::Module {
      CastImpl() { weight = register_parameter("weight", torch::ones({2})); }
      Tensor forward() { return weight.to(at::kBFloat16); }
      Tensor weight;
    };
    auto net = std::make_shared<CastImpl>();
    DistributedDataParallel<std::shared_ptr<CastImpl>> model(net);
    const double scale = world.rank + 1.0;
    for (const bool local_first : {false, true}) {
      net->zero_grad();
      auto sum = (model() * scale).sum();
      {
        const auto guard = model.no_sync();
        const auto local = (model() * scale).sum();
        // Autograd begins with the newer of the two forwards.
        sum = local_first ? sum + local : sum;
      }
      sum.backward();
      EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(),
                       local_first ? 3 : 1.5);
    }
  });
}

// A part that two forwards have in common belongs to the one that has made it,
// or to none.
WORLD_TEST(DdpOwnership, APartOfTwoForwardsBelongsToItsMaker, 2) {
  on_both_backends([&] {
    struct DoubledImpl : torch::nn::Module {
      DoubledImpl() {
        weight = register_parameter("weight", torch::ones({2}, doubles()));
      }
      Tensor forward(const Tensor& x) {
        if (!doubled.defined()) doubled = weight * 2;
        return x * doubled;
      }
      Tensor weight, doubled;
    };
    auto net = std::make_shared<DoubledImpl>();
    DistributedDataParallel<std::shared_ptr<DoubledImpl>> model(net);
    const auto x = torch::full({2}, world.rank + 1.0, doubles());
    for (const bool in_forward : {false, true}) {
      net->doubled = in_forward ? Tensor() : net->weight * 2;
      const auto output = model(x);
      {
        const auto guard = model.no_sync();
        model(x).sum().backward({}, /*retain_graph=*/true);
      }
      EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(),
                       in_forward ? 3 : 2 * (world.rank + 1.0));
      net->zero_grad();
      output.sum().backward();
      EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(), 3);
      net->zero_grad();
    }
  });
}

// Has an auxiliary loss that forward does not return, and an output that is a
// parameter itself.
struct AuxiliaryImpl : torch::nn::Module {
  AuxiliaryImpl() {
    torch::manual_seed(5);
    layer = register_module("layer", torch::nn::Linear(kIn, 2));
    weight = register_parameter("weight", torch::randn({2}));
    to(torch::kDouble);
  }
  std::tuple<Tensor, Tensor> forward(const Tensor& x) {
    auto hidden = layer(x);
    auxiliary = hidden.abs().sum();
    return {hidden * 2, weight};
  }
  torch::nn::Linear layer{nullptr};
  Tensor weight, auxiliary;
};
TORCH_MODULE(Auxiliary);

WORLD_TEST(DdpOwnership, LossesThatForwardDoesNotReturnAreAveraged, 2) {
  on_both_backends([&] {
    Auxiliary net;
    DistributedDataParallel<Auxiliary> model(net);
    const auto parameters = net->parameters();
    auto plain = [&](int rank) {
      auto [output, weight] = net->forward(rows(rank));
      return net->auxiliary * weight.sum();
    };
    for (int step = 0; step < 3; ++step) {
      const auto expected = averages(world.size, parameters, plain);
      net->zero_grad();
      auto [output, weight] = model(rows(world.rank));
      (net->auxiliary * weight.sum()).backward();
      expect_gradients(parameters, expected, "auxiliary");
    }
  });
}

WORLD_TEST(DdpOwnership, AReturnedParameterIsAveraged, 2) {
  on_both_backends([&] {
    struct BareImpl : torch::nn::Module {
      BareImpl() {
        weight = register_parameter("weight", torch::ones({2}, doubles()));
      }
      Tensor forward() { return weight; }
      Tensor weight;
    };
    auto net = std::make_shared<BareImpl>();
    DistributedDataParallel<std::shared_ptr<BareImpl>> model(net);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      (model() * world.rank).sum().backward();
      EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(), 0.5);
    }
  });
}

// No node would distinguish its graphs from those of the plain module.
WORLD_TEST(DdpOwnership, AParameterReturnedByReferenceIsRefused, 2) {
  on_both_backends([&] {
    struct BareImpl : torch::nn::Module {
      BareImpl() { weight = register_parameter("weight", torch::ones({2})); }
      Tensor& forward() { return weight; }
      Tensor weight;
    };
    auto net = std::make_shared<BareImpl>();
    DistributedDataParallel<std::shared_ptr<BareImpl>> model(net);
    EXPECT_THAT([&] { model(); }, ThrowsMessage<std::invalid_argument>(
                                      HasSubstr("return the tensor by value")));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(model().is_same(net->weight));
  });
}

struct Answer {
  Tensor logits;
  std::vector<Tensor> hidden;
};

}  // namespace
}  // namespace lockstep::internal::testing

template <>
struct lockstep::ForwardResult<lockstep::internal::testing::Answer> {
  template <typename Visit>
  static void visit(lockstep::internal::testing::Answer& answer,
                    const Visit& visit_part) {
    visit_part(answer.logits);
    visit_part(answer.hidden);
  }
};

namespace lockstep::internal::testing {
namespace {

WORLD_TEST(DdpOwnership, ResultsOfOnesOwnTypeAreVisited, 2) {
  on_both_backends([&] {
    struct OwnImpl : torch::nn::Module {
      OwnImpl() { layer = register_module("layer", torch::nn::Linear(1, 1)); }
      Answer forward(const Tensor& x) { return {x, {layer(x)}}; }
      torch::nn::Linear layer{nullptr};
    };
    auto net = std::make_shared<OwnImpl>();
    DistributedDataParallel<std::shared_ptr<OwnImpl>> model(net);
    auto x =
        torch::full({1, 1}, static_cast<double>(world.rank), torch::kFloat);
    model(x).hidden[0].sum().backward();
    EXPECT_FLOAT_EQ(net->layer->weight.grad().item<float>(), 0.5);
  });
}

// A trunk with one head for each of two tasks.
struct HeadImpl : torch::nn::Module {
  HeadImpl(torch::nn::Sequential trunk_of, int seed) {
    trunk = register_module("trunk", std::move(trunk_of));
    torch::manual_seed(seed);
    head = register_module("head", torch::nn::Linear(2, 1));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return head(trunk->forward(x)); }
  torch::nn::Sequential trunk;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Head);

WORLD_TEST(DdpOwnership, OneTrunkInTwoWrappers, 2, 3) {
  on_both_backends([&] {
    for (const bool views : {true, false}) {
      auto trunk = small_net();
      Head first(trunk, 1);
      Head second(trunk, 2);
      DistributedDataParallel<Head> a(first,
                                      {.gradient_as_bucket_view = views});
      DistributedDataParallel<Head> b(second,
                                      {.gradient_as_bucket_view = views});
      auto parameters = first->parameters();
      for (auto& parameter : second->head->parameters()) {
        parameters.push_back(parameter);
      }
      auto plain = [&](int step) {
        return [&first, &second, step](int rank) {
          return first->forward(rows(rank, step)).square().sum() +
                 second->forward(rows(rank, step + 50)).square().sum();
        };
      };
      for (int step = 0; step < 5; ++step) {
        first->zero_grad();
        second->zero_grad();
        const auto expected = averages(world.size, parameters, plain(step));
        auto loss_a = a(rows(world.rank, step)).square().sum();
        auto loss_b = b(rows(world.rank, step + 50)).square().sum();
        if (step % 2 == 0) {
          (loss_a + loss_b).backward();
        } else {
          loss_b.backward();
          loss_a.backward();
        }
        expect_gradients(parameters, expected, "two wrappers");
      }
    }
  });
}

WORLD_TEST(DdpOwnership, WrappersThatShareRefuseWhatNeedsTheGradients, 2) {
  on_both_backends([&] {
    auto trunk = small_net();
    Head first(trunk, 1);
    Head second(trunk, 2);
    const auto refused = ThrowsMessage<std::invalid_argument>(
        HasSubstr("another wrapper averages some of the parameters"));
    {
      DistributedDataParallel<Head> a(first);
      {
        DistributedDataParallel<Head> b(second);
        EXPECT_THAT(
            [&] { ZeroRedundancyOptimizer<optim::SGD> sharded(a, {.lr = 1}); },
            refused);
        EXPECT_THAT(
            [&] {
              b.apply_optimizer_in_backward([](std::vector<Tensor> one) {
                return std::make_unique<torch::optim::SGD>(std::move(one), 1);
              });
            },
            refused);
      }
      EXPECT_THAT(
          [&] {
            DistributedDataParallel<Head> b(
                second, {.mixed_precision =
                             MixedPrecision{.param_dtype = at::kBFloat16}});
          },
          refused);
    }
    Head third(trunk, 3);
    DistributedDataParallel<Head> c(third);
    ZeroRedundancyOptimizer<optim::SGD> sharded(c, {.lr = 1});
    EXPECT_THAT([&] { DistributedDataParallel<Head> a(first); }, refused);
  });
}

WORLD_TEST(DdpOwnership, ForwardInsideBackwardIsRefused, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    auto output = model(rows(world.rank));
    net->parameters()[3].register_hook([&](const Tensor& gradient) {
      const at::AutoGradMode recorded(true);
      model(rows(world.rank));
      return gradient;
    });
    EXPECT_THAT([&] { output.sum().backward(); },
                ThrowsMessage<std::logic_error>(
                    HasSubstr("forward was called while a backward")));
  });
}

// LibTorch does not show the root of a graph, and this graph has nothing else.
WORLD_TEST(DdpOwnership, AHiddenLossOfOneOperationIsRefused, 2) {
  on_both_backends([&] {
    struct HiddenImpl : torch::nn::Module {
      HiddenImpl() {
        weight = register_parameter("weight", torch::ones({2}, doubles()));
      }
      Tensor forward(const Tensor& x) {
        penalty = weight.dot(x);
        return x * weight;
      }
      Tensor weight, penalty;
    };
    auto net = std::make_shared<HiddenImpl>();
    DistributedDataParallel<std::shared_ptr<HiddenImpl>> model(net);
    const auto x = torch::full({2}, world.rank + 1.0, doubles());
    model(x);
    EXPECT_THAT(
        [&] { net->penalty.backward({}, /*retain_graph=*/true); },
        ThrowsMessage<std::runtime_error>(HasSubstr("straight to parameters")));
    net->zero_grad();
    (net->penalty * 1).backward();
    EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(), 1.5);
    // No forward is open now, so a penalty on the weight alone stays local.
    net->zero_grad();
    (net->weight * (world.rank + 1.0)).sum().backward();
    EXPECT_DOUBLE_EQ(net->weight.grad()[0].item<double>(), world.rank + 1.0);
  });
}

// Regression: forwards of the main thread were forgotten at once after another
// thread had made thousands.
WORLD_TEST(DdpOwnership, TheOldestForwardsAreForgottenFirst, 2) {
  auto group = init_process_group("lockstep");
  Auxiliary net;
  DistributedDataParallel<Auxiliary> model(net);
  const auto parameters = net->parameters();
  model(rows(world.rank));
  auto oldest = net->auxiliary * 2;
  std::thread([&] {
    for (int i = 0; i < 5000; ++i) (std::get<0>(model(rows(0))) * 2).sum();
  }).join();
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    auto [output, weight] = model(rows(world.rank, step));
    (net->auxiliary * weight.sum()).backward();
    expect_gradients(parameters,
                     averages(world.size, parameters,
                              [&](int rank) {
                                auto [out, bare] =
                                    net->forward(rows(rank, step));
                                return net->auxiliary * bare.sum();
                              }),
                     "after thousands of forwards");
  }
  EXPECT_THAT([&] { oldest.backward(); },
              ThrowsMessage<std::runtime_error>(HasSubstr("is older than")));
}

}  // namespace
}  // namespace lockstep::internal::testing

// Parameters whose dtype or requires_grad changes while they are trained, and
// wrappers that come and go.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/rank_averages.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Wrapped = DistributedDataParallel<torch::nn::Sequential>;

// LibTorch then makes a new node that accumulates the gradients.
WORLD_TEST(DdpChanges, DtypeRoundTripsKeepAveraging, 2) {
  on_both_backends([&] {
    auto net = small_net();
    net->to(torch::kFloat);
    net->to(torch::kDouble);
    Wrapped model(net);
    const auto parameters = net->parameters();
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      auto before = model(rows(world.rank, step + 10)).square().sum();
      net->to(torch::kFloat);
      net->to(torch::kDouble);
      model(rows(world.rank, step)).square().sum().backward();
      auto expected = averages(world.size, parameters, loss_of(net, step));
      expect_gradients(parameters, expected, "after the round trip");
      if (step < 2) continue;
      before.backward();  // a graph with the old node
      const auto older =
          averages(world.size, parameters, loss_of(net, step + 10));
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += older[i];
      expect_gradients(parameters, expected, "of the graph before");
    }
  });
}

WORLD_TEST(DdpChanges, WhatIsFrozenInEveryOtherStepKeepsItsBuckets, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    std::vector<const void*> places;
    for (int step = 0; step < 10; ++step) {
      net->zero_grad();
      const bool frozen = step % 2 == 1;
      for (int i : {0, 1}) parameters[i].requires_grad_(!frozen);
      model(rows(world.rank, step)).square().sum().backward();
      const Gradients trained(parameters.begin() + (frozen ? 2 : 0),
                              parameters.end());
      expect_gradients(trained,
                       averages(world.size, trained, loss_of(net, step)),
                       "frozen and not");
      EXPECT_EQ(parameters[0].grad().defined(), !frozen);
      places.push_back(parameters[3].grad().const_data_ptr());
      EXPECT_EQ(model.get_ddp_logging_data().iteration, step + 1);
    }
    EXPECT_NE(places[8], places[9]);
    EXPECT_EQ(places[8], places[6]);
    EXPECT_EQ(places[9], places[7]);
  });
}

WORLD_TEST(DdpChanges, WrappersUsedInAThreadThatEndsLeaveNothing, 2) {
  on_both_backends([&] {
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> weights;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> buckets;
    for (int i = 0; i < 4; ++i) {
      torch::nn::Linear net(256, 256);
      DistributedDataParallel<torch::nn::Linear> model(net);
      std::thread([&] {
        for (int step = 0; step < 3; ++step) {
          net->zero_grad();
          model(torch::ones({1, 256})).sum().backward();
        }
      }).join();
      weights.emplace_back(net->weight.getIntrusivePtr());
      buckets.push_back(net->weight.grad().storage().getWeakStorageImpl());
    }
    for (const auto& weight : weights) EXPECT_TRUE(weight.expired());
    // Gloo may keep the tensors of its last operation.
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(buckets[i].expired()) << i;
  });
}

WORLD_TEST(DdpChanges, ParametersAreLowOnlyWhileTheyAreWorkedWith, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(kIn, 2);
    DistributedDataParallel<torch::nn::Linear> model(
        net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    auto x = torch::ones({2, kIn});
    auto unused = model(x);
    EXPECT_EQ(unused.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      auto loss = (model(x) * (world.rank + 1)).sum();
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
      loss.backward();
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
      ASSERT_EQ(net->weight.grad().scalar_type(), at::kFloat);
      EXPECT_FLOAT_EQ(net->weight.grad()[0][0].item<float>(), 3);
    }
  });
}

// Regression: the third forward kept the low-precision copies of the second,
// which had none.
WORLD_TEST(DdpChanges, ADtypeThatComesBackIsLoweredAgain, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(kIn, 2);
    DistributedDataParallel<torch::nn::Linear> model(
        net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kFloat}) {
      net->to(dtype);
      net->zero_grad();
      const auto output = model(torch::ones({2, kIn}));
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->weight.scalar_type(), dtype);
      (output * (world.rank + 1)).sum().backward();
      ASSERT_EQ(net->weight.grad().scalar_type(), dtype);
      EXPECT_FLOAT_EQ(net->weight.grad()[0][0].item<float>(), 3);
    }
  });
}

WORLD_TEST(DdpChanges, FreezingUnderJoinIsRefused, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    EXPECT_THAT(
        [&] {
          model.join([&] {
            model(rows(world.rank)).sum().backward();
            net->parameters()[0].requires_grad_(false);
            model(rows(world.rank)).sum().backward();
          });
        },
        ThrowsMessage<std::logic_error>(HasSubstr("under join()")));
  });
}

// Regression: what had changed after the last forward before join() was refused
// in the first forward under it. Rank 0 has no inputs, and follows the change.
WORLD_TEST(DdpChanges, FreezingBeforeJoinIsNoChangeUnderIt, 2, 3) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    for (int epoch = 0; epoch < 4; ++epoch) {
      const bool frozen = epoch % 2 == 0;
      net->zero_grad();
      for (int i : {0, 1}) parameters[i].requires_grad_(!frozen);
      const Gradients trained(parameters.begin() + (frozen ? 2 : 0),
                              parameters.end());
      model.join([&] {
        for (int step = 0; step < world.rank; ++step) {
          net->zero_grad();
          model(rows(world.rank, step)).square().sum().backward();
          expect_gradients(trained,
                           averages(world.size, trained,
                                    [&](int rank) {
                                      const auto loss =
                                          loss_of(net, step)(rank);
                                      return rank > step ? loss : 0 * loss;
                                    }),
                           "under join()");
        }
      });
      // Outside of it all ranks have the same buckets, too.
      net->zero_grad();
      model(rows(world.rank)).square().sum().backward();
      expect_gradients(trained, averages(world.size, trained, loss_of(net)),
                       "after join()");
    }
  });
}

// Regression: buckets from before kept the divisor of an earlier join(), so the
// first step with them divided by the ranks that had been active last.
WORLD_TEST(DdpChanges, UnfreezingAfterJoinDividesByAllRanks, 2, 3) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    const auto train = [&] {
      model.join(
          [&] {
            for (int step = 0; step < world.rank; ++step) {
              model(rows(world.rank, step)).square().sum().backward();
            }
          },
          {.divide_by_initial_world_size = false});
    };
    train();
    parameters[0].requires_grad_(false);
    train();
    parameters[0].requires_grad_(true);
    net->zero_grad();
    model(rows(world.rank)).square().sum().backward();
    expect_gradients(parameters, averages(world.size, parameters, loss_of(net)),
                     "after join()");
  });
}

// Regression: buckets of the earlier dtype were made again in the later dtype.
WORLD_TEST(DdpChanges, EachDtypeKeepsItsBuckets, 2) {
  on_both_backends([&] {
    for (const bool views : {true, false}) {
      auto net = small_net();
      Wrapped model(net, {.gradient_as_bucket_view = views});
      for (const auto dtype :
           {torch::kDouble, torch::kFloat, torch::kDouble, torch::kBFloat16,
            torch::kFloat, torch::kDouble, torch::kDouble}) {
        net->to(dtype);
        net->zero_grad();
        model(rows(world.rank).to(dtype)).square().sum().backward();
        const auto parameters = net->parameters();
        for (const auto& parameter : parameters) {
          ASSERT_EQ(parameter.grad().scalar_type(), dtype);
        }
        if (dtype != torch::kDouble) continue;
        expect_gradients(parameters,
                         averages(world.size, parameters, loss_of(net)),
                         "in float64");
      }
    }
  });
}

// A GAN does this in the generator's step.
WORLD_TEST(DdpChanges, AllParametersMayBeFrozen, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      for (auto& parameter : net->parameters()) {
        parameter.requires_grad_(step % 2 == 1);
      }
      auto input = rows(world.rank, step).requires_grad_();
      model(input).square().sum().backward();
      EXPECT_TRUE(input.grad().defined());
      if (step % 2 == 0) continue;
      expect_gradients(
          net->parameters(),
          averages(world.size, net->parameters(), loss_of(net, step)),
          "not frozen");
    }
  });
}

WORLD_TEST(DdpChanges, GradientsMayBeSwapped, 2) {
  on_both_backends([&] {
    struct TwoImpl : torch::nn::Module {
      TwoImpl() {
        torch::manual_seed(2);
        a = register_parameter("a", torch::randn({kIn}, doubles()));
        b = register_parameter("b", torch::randn({kIn}, doubles()));
      }
      Tensor forward(const Tensor& x) { return x * a + (x * b).tanh(); }
      Tensor a, b;
    };
    auto net = std::make_shared<TwoImpl>();
    DistributedDataParallel<std::shared_ptr<TwoImpl>> model(net);
    const auto parameters = net->parameters();
    const auto mean = averages(world.size, parameters, [&](int rank) {
      return net->forward(rows(rank)).square().sum();
    });
    model(rows(world.rank)).square().sum().backward();
    std::swap(net->a.mutable_grad(), net->b.mutable_grad());
    model(rows(world.rank)).square().sum().backward();
    expect_gradients(parameters, {mean[0] + mean[1], mean[1] + mean[0]},
                     "swapped");
  });
}

// Regression: if requires_grad changed between two forwards, one backward over
// both left gradients that were neither rank's nor the average.
WORLD_TEST(DdpChanges, OneBackwardOverForwardsThatTrainOthersIsRefused, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    // Autograd accumulates no gradient while requires_grad is off.
    const auto loss = [&](int step, bool with_bias) {
      parameters[3].requires_grad_(with_bias);
      const auto sum = model(rows(world.rank, step)).square().sum();
      parameters[3].requires_grad_(true);
      return sum;
    };
    for (int step = 0; step < 6; step += 2) {
      net->zero_grad();
      const auto whole = loss(step, true);
      const auto part = loss(step + 1, false);
      EXPECT_THAT([&] { (whole + part).backward(); },
                  ThrowsMessage<std::logic_error>(
                      HasSubstr("call backward() for each of them")));
      // Each by itself is averaged.
      net->zero_grad();
      const auto whole_again = loss(step, true);
      loss(step + 1, false).backward();
      whole_again.backward();
      auto expected = averages(world.size, parameters, loss_of(net, step));
      const auto second =
          averages(world.size, parameters, loss_of(net, step + 1));
      for (size_t i = 0; i < 3; ++i) expected[i] += second[i];
      expect_gradients(parameters, expected, "one after the other");
    }
  });
}

WORLD_TEST(DdpChanges, OneBackwardMayTrainOneParameterPerForward, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    const auto loss = [&](int step, size_t trained) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].requires_grad_(i == trained);
      }
      const auto sum = model(rows(world.rank, step)).square().sum();
      for (const auto& parameter : parameters) parameter.requires_grad_(true);
      return sum;
    };
    for (int step = 0; step < 6; step += 2) {
      net->zero_grad();
      const auto first = loss(step, 0);
      (first + loss(step + 1, 2)).backward();
      expect_gradients(
          {parameters[0]},
          {averages(world.size, parameters, loss_of(net, step))[0]}, "first");
      expect_gradients(
          {parameters[2]},
          {averages(world.size, parameters, loss_of(net, step + 1))[2]},
          "second");
    }
  });
}

// Regression: the buckets of the oldest of five sets of trained parameters are
// dropped; a backward through a forward from then left each rank its own
// gradients.
WORLD_TEST(DdpChanges, ABackwardWhoseBucketsAreDroppedIsRefused, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto parameters = net->parameters();
    const auto oldest = model(rows(world.rank)).square().sum();
    for (const auto& parameter : parameters) {
      parameter.requires_grad_(false);
      { const auto unused = model(rows(world.rank)); }
      parameter.requires_grad_(true);
    }
    EXPECT_THAT([&] { oldest.backward(); },
                ThrowsMessage<std::logic_error>(
                    HasSubstr("buckets have been dropped")));
    net->zero_grad();
    model(rows(world.rank)).square().sum().backward();
    expect_gradients(parameters, averages(world.size, parameters, loss_of(net)),
                     "afterwards");
  });
}

// Regression: after a change of requires_grad the wrapper did not know any more
// what a backward under no_sync had used, and left each rank its own gradient.
WORLD_TEST(DdpChanges, LocalGradientsFromBeforeAChangeAreAveraged, 2) {
  struct ThreeImpl : torch::nn::Module {
    ThreeImpl() {
      for (auto* each : {&first, &second, &third}) {
        *each = register_parameter(std::to_string(names++),
                                   torch::ones({1}, doubles()));
      }
    }
    Tensor forward(const Tensor& x, bool with_second) {
      const auto y = x * first * third;
      return with_second ? y * second : y;
    }
    int names = 0;
    Tensor first, second, third;
  };
  on_both_backends([&] {
    for (const bool other : {true, false}) {
      auto net = std::make_shared<ThreeImpl>();
      DistributedDataParallel<std::shared_ptr<ThreeImpl>> model(
          net, {.find_unused_parameters = true});
      const auto x = torch::ones({1}, doubles());
      {
        auto local = model.no_sync();
        model(x, world.rank == 0).backward();
      }
      auto& frozen = other ? net->third : net->second;
      frozen.requires_grad_(false);
      model(x, false).backward();
      frozen.requires_grad_(true);
      if (!other) model(x, false).backward();
      ASSERT_TRUE(net->second.grad().defined()) << other;
      EXPECT_DOUBLE_EQ(net->second.grad().item<double>(), 0.5) << other;
      // A gradient that is averaged is not averaged again.
      net->second.mutable_grad() = torch::full({1}, 3. + world.rank, doubles());
      model(x, false).backward();
      EXPECT_DOUBLE_EQ(net->second.grad().item<double>(), 3. + world.rank);
    }
  });
}

// Regression: buckets that had been made before the hook was registered, for
// other trained parameters, were averaged without it.
WORLD_TEST(DdpChanges, AHookReducesWhateverIsTrained, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto weight = net->parameters()[0];
    weight.requires_grad_(false);
    { const auto unused = model(rows(world.rank)); }
    int calls = 0;
    model.register_comm_hook([&calls](GradBucket& bucket) {
      ++calls;
      return completed_future(bucket.buffer());
    });
    for (int step = 1; step <= 4; ++step) {
      weight.requires_grad_(step % 2 == 0);
      net->zero_grad();
      model(rows(world.rank)).square().sum().backward();
      EXPECT_EQ(calls, step);
    }
  });
}

// The graph of the returned tensor is older than forward, so it has no node of
// forward.
WORLD_TEST(DdpChanges, AReturnedTensorOfAnOlderGraphIsAveraged, 2) {
  on_both_backends([&] {
    struct CachedImpl : torch::nn::Module {
      CachedImpl() {
        weight = register_parameter("weight", torch::ones({1}, doubles()));
      }
      Tensor forward() { return cached; }
      Tensor weight, cached;
    };
    auto net = std::make_shared<CachedImpl>();
    DistributedDataParallel<std::shared_ptr<CachedImpl>> model(net);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      net->cached = net->weight * 2;
      (model() * (world.rank + 1.0)).sum().backward();
      EXPECT_DOUBLE_EQ(net->weight.grad().item<double>(), 3);
    }
  });
}

// Regression: added layers were trained on each rank alone.
WORLD_TEST(DdpChanges, OtherParametersThanWhenWrappedAreRefused, 2) {
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    const auto forward = [&] { model(rows(world.rank)); };
    forward();
    const auto bias = net->parameters()[1];
    const auto data = bias.data();
    bias.set_data(torch::ones({4}, doubles()));
    EXPECT_THAT(forward, ThrowsMessage<std::invalid_argument>(
                             HasSubstr("'0.bias' has the sizes [4], but [5] "
                                       "when it was wrapped")));
    bias.set_data(data);
    forward();
    net->push_back(torch::nn::Linear(2, 6));
    EXPECT_THAT(forward, ThrowsMessage<std::invalid_argument>(HasSubstr(
                             "the module has 6 parameters, and '3.weight' of "
                             "[6, 2] was not among them, but 4 when")));
  });
  on_both_backends([&] {
    auto net = small_net();
    Wrapped model(net);
    auto& first = *net[0]->as<torch::nn::Linear>();
    first.bias = first.named_parameters()["bias"].clone();  // not registered
    EXPECT_NO_THROW(model(rows(world.rank)));
  });
}

}  // namespace
}  // namespace lockstep::internal::testing

// Exceptions in the middle of a backward, on all ranks and on one rank.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/rank_averages.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Throws in backward if `fails`.
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
        EXPECT_THAT([&] { loss.backward({}, /*retain_graph=*/true); },
                    ThrowsMessage<std::runtime_error>(HasSubstr("is fragile")));
        // Runs the plain module in between.
        net->fails = false;
        net->zero_grad();
        net->forward(rows(7)).sum().backward();
        net->zero_grad();
        loss = model(rows(world.rank, step)).square().sum();
      }
      loss.backward();
      expect_gradients(parameters,
                       averages(world.size, parameters, loss_of(net, step)),
                       "around exceptions");
    }
  });
}

// Regression: the peers waited until their deadline, or averaged two
// iterations.
WORLD_TEST(DdpExceptions, PeersOfABackwardThatThrewAreToldAtOnce, 2, 3) {
  auto group =
      init_process_group("lockstep", {.timeout = std::chrono::seconds(50)});
  FragileNet net;
  DistributedDataParallel<FragileNet> model(net);
  const auto parameters = net->parameters();
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    net->fails = step % 2 == 1 && world.rank == world.size - 1;
    auto loss = model(rows(world.rank, step)).square().sum();
    if (step % 2 == 1) {
      const auto begun = std::chrono::steady_clock::now();
      const std::string words = net->fails
                                    ? std::string("is fragile")
                                    : "rank " + std::to_string(world.size - 1);
      std::string said;
      try {
        loss.backward();
      } catch (const std::exception& error) {
        said = error.what();
      }
      EXPECT_THAT(said, HasSubstr(words));
      if (!net->fails) {
        EXPECT_THAT(said, HasSubstr("has given up iteration"));
      }
      // The error must come long before the group's deadline.
      EXPECT_LT(std::chrono::steady_clock::now() - begun,
                std::chrono::seconds(25));
      continue;
    }
    loss.backward();
    expect_gradients(parameters,
                     averages(world.size, parameters, loss_of(net, step)),
                     "after one rank's exception");
  }
}

// Forward, the loss, or the part of backward outside of the wrapper throws on
// one rank. Regression: that rank had not begun its reduction, so its next
// reduction met the others' reduction of this iteration.
WORLD_TEST(DdpExceptions, AnIterationThatOneRankLosesInItsLossIsNotMixed, 2) {
  for (const char* place : {"backward", "loss", "forward"}) {
    SCOPED_TRACE(place);
    const std::string_view where = place;
    auto group =
        init_process_group("lockstep", {.timeout = std::chrono::seconds(50)});
    auto net = small_net();
    DistributedDataParallel<torch::nn::Sequential> model(net);
    const auto parameters = net->parameters();
    for (int step = 0; step < 5; ++step) {
      net->zero_grad();
      const bool fails = step == 2 && world.rank == 1;
      std::string said;
      try {
        if (fails && where == "forward") model(torch::ones({1}));
        auto output = model(rows(world.rank, step));
        if (fails && where == "loss") throw std::runtime_error("is fragile");
        Fragile::apply(output, fails).square().sum().backward();
      } catch (const std::exception& error) {
        said = error.what();
      }
      if (step == 2) {
        EXPECT_THAT(said, HasSubstr(!fails ? "rank 1 has given up iteration"
                                    : where == "forward" ? "mat1 and mat2"
                                                         : "is fragile"));
        continue;
      }
      EXPECT_EQ(said, "");
      expect_gradients(parameters,
                       averages(world.size, parameters, loss_of(net, step)),
                       "around the lost iteration");
    }
  }
}

// A rank skips a step whose loss is not finite. Regression: from then on its
// iterations were averaged with the next ones of the others.
void expect_skipped_backward_named(const World& world) {
  auto net = small_net();
  DistributedDataParallel<torch::nn::Sequential> model(net);
  const auto parameters = net->parameters();
  for (int step = 0; step < 6; ++step) {
    net->zero_grad();
    {
      // These do not count, so one rank may make them alone.
      const torch::NoGradGuard no_grad;
      if (world.rank == 0) model(rows(7));
    }
    if (world.rank == 0 && step > 0) {
      net->eval();
      model(rows(7));
      net->train();
    }
    if (step == 2 && world.rank == 1) model(rows(world.rank, step));
    auto loss = model(rows(world.rank, step)).square().sum();
    if (step != 2) {
      loss.backward();
      expect_gradients(parameters,
                       averages(world.size, parameters, loss_of(net, step)),
                       "around the skipped step");
      continue;
    }
    EXPECT_THAT([&] { loss.backward(); },
                ThrowsMessage<c10::DistBackendError>(
                    AllOf(HasSubstr(" number 3 after 0 forwards without a "),
                          HasSubstr("rank 1 number 3 after 1 forward without "
                                    "a backward"),
                          HasSubstr("has skipped a step"))));
  }
}

WORLD_TEST(DdpExceptions, ARankThatSkipsABackwardIsNamed, 2, 3) {
  auto group =
      init_process_group("lockstep", {.timeout = std::chrono::seconds(50)});
  expect_skipped_backward_named(world);
}

WORLD_TEST(DdpExceptions, ARankThatSkipsABackwardIsNamedOnGlooThatChecks, 2) {
  auto group = init_process_group(
      "gloo", {.timeout = std::chrono::seconds(50), .check_calls = true});
  expect_skipped_backward_named(world);
}

// Nothing compared the iterations of a hook, nor those of a model whose
// gradients are all sparse.
WORLD_TEST(DdpExceptions, ASkippedBackwardIsNamedWithAHookToo, 2, 3) {
  for (const bool checks_calls : {false, true}) {
    auto group = init_process_group(
        "lockstep",
        {.timeout = std::chrono::seconds(50), .check_calls = checks_calls});
    for (const char* way : {"fp16", "power_sgd", "sparse"}) {
      SCOPED_TRACE(way);
      const std::string_view kind = way;
      const bool is_sparse = kind == "sparse";
      torch::nn::Sequential net(torch::nn::Embedding(
          torch::nn::EmbeddingOptions(8, 3).sparse(is_sparse)));
      net->to(torch::kDouble);
      DistributedDataParallel<torch::nn::Sequential> model(net);
      if (kind == "fp16") {
        model.register_comm_hook(
            fp16_compress_wrapper(allreduce_hook(group.get())));
      } else if (kind == "power_sgd") {
        model.register_comm_hook(
            power_sgd_hook(std::make_shared<PowerSGDState>(PowerSGDOptions{})));
      }
      const auto loss = [&](int step) {
        const auto rows = torch::arange(2) + world.rank + step;
        return model(rows).square().sum();
      };
      for (int step = 0; step < 5; ++step) {
        net->zero_grad();
        if (step == 2 && world.rank == 1) loss(step);
        auto made = loss(step);
        if (step != 2) {
          made.backward();
          continue;
        }
        EXPECT_THAT([&] { made.backward(); },
                    ThrowsMessage<c10::DistBackendError>(AllOf(
                        HasSubstr("number 3 after 0 forwards without a "),
                        HasSubstr("rank 1 number 3 after 1 forward without a "
                                  "backward"))));
      }
    }
  }
}

// A rank that keeps the graph of the step that it skips, as in `total += loss`.
WORLD_TEST(DdpExceptions, ASkippedBackwardWhoseGraphIsKeptIsNamed, 2) {
  auto group =
      init_process_group("lockstep", {.timeout = std::chrono::seconds(50)});
  auto net = small_net();
  DistributedDataParallel<torch::nn::Sequential> model(net);
  auto total = torch::zeros({}, torch::kDouble);
  const auto step = [&](int number) {
    auto loss = model(rows(world.rank, number)).square().sum();
    total = total + loss;
    if (number != 1 || world.rank != 1) loss.backward();
  };
  step(0);
  EXPECT_THAT(
      [&] {
        for (int number = 1; number < 5; ++number) step(number);
      },
      ThrowsMessage<c10::DistBackendError>(
          HasSubstr("rank 1 number 2 after 1 forward without a backward")));
}

// Results that one rank keeps, and that go through no backward on any rank.
// Regression: they counted as left out on the others only.
WORLD_TEST(DdpExceptions, AResultThatOneRankKeepsIsLeftOutLikeTheOthers, 2) {
  on_both_backends([&] {
    auto net = small_net();
    DistributedDataParallel<torch::nn::Sequential> model(net);
    std::vector<at::Tensor> kept;
    for (int step = 0; step < 3; ++step) {
      auto output = model(rows(7));
      if (world.rank == step % 2) kept.push_back(output);
      output = model(rows(world.rank, step));
      output.square().sum().backward();
    }
    kept.push_back(model(rows(7)));
    model.join([&] {
      for (int step = 0; step < 3 * world.rank; ++step) {
        model(rows(world.rank, step)).square().sum().backward();
      }
    });
  });
}

struct TwoResultsImpl : torch::nn::Module {
  TwoResultsImpl() {
    layer = register_module("layer", torch::nn::Linear(kIn, 2));
    to(torch::kDouble);
  }
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const auto y = layer(x);
    return {y.sigmoid(), y.tanh()};
  }
  torch::nn::Linear layer{nullptr};
};

// One of its results is dropped. Regression: the next forward's node got the
// address of the dropped one's, on the ranks that had nothing else there, and
// the kept forward counted as used there.
WORLD_TEST(DdpExceptions, AForwardOfWhichOneResultIsKeptIsLeftOut, 2) {
  auto group = init_process_group();
  DistributedDataParallel<TwoResultsImpl> model(
      std::make_shared<TwoResultsImpl>());
  const auto leaf = torch::ones({2}, torch::kDouble).requires_grad_();
  std::vector<Tensor> kept;
  for (int step = 0; step < 5; ++step) {
    kept.push_back(model(rows(7)).first);
    if (world.rank == step % 2) kept.push_back(leaf.tanh());
    const auto result = model(rows(world.rank, step));
    (result.first + result.second).sum().backward();
  }
}

// Episodes of different lengths, as in reinforcement learning. Regression: the
// ranks were said to average different iterations.
WORLD_TEST(DdpExceptions, RanksMayMakeOtherNumbersOfForwardsForABackward, 2,
           3) {
  on_both_backends([&] {
    auto net = small_net();
    DistributedDataParallel<torch::nn::Sequential> model(net);
    const auto parameters = net->parameters();
    for (int step = 0; step < 4; ++step) {
      const auto loss = [&](auto& forward, int rank) {
        auto sum = torch::zeros({}, torch::kDouble);
        for (int i = 0; i <= (rank + step) % 3; ++i) {
          sum = sum + forward->forward(rows(rank, 3 * step + i)).square().sum();
        }
        return sum;
      };
      net->zero_grad();
      loss(model, world.rank).backward();
      expect_gradients(parameters,
                       averages(world.size, parameters,
                                [&](int rank) { return loss(net, rank); }),
                       "episodes");
    }
  });
}

// Only in shared memory are peers told. Elsewhere they must at least get no sum
// of two iterations.
WORLD_TEST(DdpExceptions, PeersOnGlooGetNaNForWhatARankGaveUp, 2) {
  auto group = init_process_group("gloo");
  FragileNet net;
  DistributedDataParallel<FragileNet> model(net);
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    net->fails = step == 2 && world.rank == 1;
    auto loss = model(rows(world.rank, step)).square().sum();
    if (net->fails) {
      EXPECT_THROW(loss.backward(), std::runtime_error);
      continue;
    }
    loss.backward();
    if (step == 2) {
      EXPECT_TRUE(net->first->weight.grad().isnan().all().item<bool>());
    } else {
      expect_gradients(
          net->parameters(),
          averages(world.size, net->parameters(), loss_of(net, step)),
          "around what was given up");
    }
  }
}

// Regression: an unexpected sparse gradient ended the process.
WORLD_TEST(DdpExceptions, AnUnexpectedSparseGradientIsNamed, 2) {
  on_both_backends([&] {
    struct TableImpl : torch::nn::Module {
      TableImpl() { table = register_parameter("table", torch::ones({4, 2})); }
      Tensor forward(const Tensor& index) {
        return torch::embedding(table, index, -1, false, /*sparse=*/true);
      }
      Tensor table;
    };
    auto net = std::make_shared<TableImpl>();
    DistributedDataParallel<std::shared_ptr<TableImpl>> model(net);
    EXPECT_THAT([&] { model(torch::tensor({1, 2})).sum().backward(); },
                ThrowsMessage<std::runtime_error>(
                    HasSubstr("the gradient of 'table' is sparse")));
  });
}

WORLD_TEST(DdpExceptions, SteppingInBackwardCannotBeTakenBack, 2) {
  on_both_backends([&] {
    FragileNet net;
    DistributedDataParallel<FragileNet> model(net);
    model.apply_optimizer_in_backward([](std::vector<Tensor> one) {
      return std::make_unique<torch::optim::SGD>(std::move(one), 0.1);
    });
    net->fails = true;
    auto loss = model(rows(world.rank)).sum();
    EXPECT_THROW(loss.backward(), std::runtime_error);
    net->fails = false;
    std::string said;
    try {
      model(rows(world.rank));
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    EXPECT_THAT(said, HasSubstr("load a snapshot on all ranks"));
    model(rows(world.rank)).sum().backward();
  });
}

// Regression: parameters that only a given-up iteration had used still counted
// as used after it.
WORLD_TEST(DdpExceptions, WhatAGivenUpIterationUsedIsUnusedAgain, 2) {
  on_both_backends([&] {
    FragileNet net;
    net->register_parameter("extra", torch::ones({2}, doubles()));
    DistributedDataParallel<FragileNet> model(net,
                                              {.find_unused_parameters = true});
    auto extra = net->named_parameters()["extra"];
    net->fails = true;
    auto loss = (model(rows(world.rank)) * extra).sum();
    EXPECT_THROW(loss.backward(), std::runtime_error);
    net->fails = false;
    net->zero_grad();
    model(rows(world.rank)).sum().backward();
    EXPECT_FALSE(extra.grad().defined());
  });
}

// Regression: the collectives of a hook met those of the other rank's next
// iteration.
WORLD_TEST(DdpExceptions, HooksOfTwoIterationsDoNotMeet, 2) {
  auto group =
      init_process_group("lockstep", {.timeout = std::chrono::seconds(50)});
  FragileNet net;
  DistributedDataParallel<FragileNet> model(net);
  model.register_comm_hook([&](GradBucket& bucket) {
    auto buffer = bucket.buffer();
    all_reduce(buffer);
    buffer.div_(world.size);
    return completed_future(buffer);
  });
  int right = 0;
  for (int step = 0; step < 8; ++step) {
    net->zero_grad();
    net->fails = step == 2 && world.rank == 1;
    try {
      model(rows(world.rank, step)).square().sum().backward();
    } catch (const std::exception&) {
      EXPECT_EQ(step, 2);
      continue;
    }
    expect_gradients(
        net->parameters(),
        averages(world.size, net->parameters(), loss_of(net, step)),
        "with a hook");
    ++right;
  }
  EXPECT_EQ(right, 7);
}

// The buckets still hold the gradients accumulated before the lost iteration.
WORLD_TEST(DdpExceptions, ALostIterationLeavesAccumulatedGradientsAlone, 1, 2) {
  on_both_backends([&] {
    auto net = small_net();
    DistributedDataParallel<torch::nn::Sequential> model(net);
    const auto parameters = net->parameters();
    model(rows(world.rank, 0)).square().sum().backward();
    auto expected = averages(world.size, parameters, loss_of(net, 0));
    try {
      auto output = model(rows(world.rank, 1));
      throw std::runtime_error("the loss throws");
    } catch (const std::runtime_error&) {
    }
    expect_gradients(parameters, expected, "before the next forward");
    model(rows(world.rank, 2)).square().sum().backward();
    const auto later = averages(world.size, parameters, loss_of(net, 2));
    for (size_t i = 0; i < later.size(); ++i) expected[i] += later[i];
    expect_gradients(parameters, expected, "after it");
  });
}

}  // namespace
}  // namespace lockstep::internal::testing

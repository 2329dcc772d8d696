// Ranks with different numbers of batches, on shared memory and on Gloo.

#include "lockstep/parallel/join/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_both_backends;
using ::testing::ThrowsMessage;
using testing::World;

// Has one number, whose gradient is the rank's input.
struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(bool with_buffer = false) {
    factor = register_parameter("factor", torch::ones({3}));
    if (with_buffer) seen = register_buffer("seen", torch::zeros({1}));
  }
  torch::Tensor forward(double x) {
    if (seen.defined()) seen += x;
    return (factor * x).sum();
  }
  torch::Tensor factor;
  torch::Tensor seen{};
};
TORCH_MODULE(Scale);

// Ranks 0, 1, ... train for 2, 3, ... steps.
int steps_of(int rank) { return 2 + rank; }

// Returns the parameter after all steps; each step averages over the ranks that
// still train.
float expected(int size, bool by_size) {
  double factor = 1;
  for (int step = 0; step < steps_of(size - 1); ++step) {
    double sum = 0;
    int active = 0;
    for (int rank = 0; rank < size; ++rank) {
      if (step >= steps_of(rank)) continue;
      sum += rank + 1;
      ++active;
    }
    factor -= 0.5 * sum / (by_size ? size : active);
  }
  return static_cast<float>(factor);
}

void train(int rank, int size, bool by_size,
           const DistributedDataParallelOptions& options) {
  Scale net;
  DistributedDataParallel<Scale> model(net, options);
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  for (int epoch = 0; epoch < 2; ++epoch) {
    {
      at::NoGradGuard no_grad;
      net->factor.fill_(1);
    }
    model.join(
        [&] {
          for (int step = 0; step < steps_of(rank); ++step) {
            optimizer.zero_grad();
            model(rank + 1.0).backward();
            optimizer.step();
          }
        },
        {.divide_by_initial_world_size = by_size});
    EXPECT_FLOAT_EQ(net->factor[0].item<float>(), expected(size, by_size))
        << epoch;
  }
}

WORLD_TEST(Join, RanksWithoutInputsShadowTheOthers, 1, 2, 3) {
  on_both_backends([&] {
    train(world.rank, world.size, true, {});
    train(world.rank, world.size, false, {});
  });
}

WORLD_TEST(Join, WorksWithUnusedAndStaticGraphs, 2, 3) {
  on_both_backends([&] {
    train(world.rank, world.size, true, {.find_unused_parameters = true});
    train(world.rank, world.size, false, {.static_graph = true});
    train(world.rank, world.size, false, {.gradient_as_bucket_view = false});
  });
}

WORLD_TEST(Join, ARankWithNoInputAtAllGetsTheModel, 2) {
  on_both_backends([&] {
    Scale net;
    DistributedDataParallel<Scale> model(net);
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    model.join(
        [&] {
          for (int step = 0; step < (world.rank == 0 ? 3 : 0); ++step) {
            optimizer.zero_grad();
            model(1.0).backward();
            optimizer.step();
          }
        },
        {.divide_by_initial_world_size = false});
    EXPECT_FLOAT_EQ(net->factor[0].item<float>(), 1 - 3 * 0.5);
  });
}

// The rank must not accumulate onto gradients that it averaged as a shadow.
WORLD_TEST(Join, ShadowsLeaveNoGradients, 2) {
  on_both_backends([&] {
    for (bool view : {true, false}) {
      Scale net;
      DistributedDataParallel<Scale> model(net,
                                           {.gradient_as_bucket_view = view});
      model.join([&] {
        for (int step = 0; step < 1 + 2 * world.rank; ++step) {
          model(1.0).backward();
          net->zero_grad();
        }
      });
      EXPECT_FALSE(net->factor.grad().defined()) << view;
    }
  });
}

WORLD_TEST(Join, BuffersComeFromTheHighestRankThatStillTrains, 2, 3) {
  // The highest rank ends first.
  auto steps = [&](int rank) { return 1 + world.size - rank; };
  on_both_backends([&] {
    Scale net(true);
    DistributedDataParallel<Scale> model(net);
    model.join([&] {
      for (int step = 0; step < steps(world.rank); ++step) {
        net->zero_grad();
        model(world.rank + 1.0).backward();
      }
    });
    // Each step but the first begins with the buffer of the highest rank that
    // still trains; at the end it is that of rank 0, which trains longest.
    double seen = 1;
    for (int step = 1; step < steps(0); ++step) {
      int highest = world.size - 1;
      while (step >= steps(highest)) --highest;
      seen += highest + 1;
    }
    EXPECT_FLOAT_EQ(net->seen.item<float>(), seen);
  });
}

WORLD_TEST(Join, StepsWithoutSynchronisationAreShadowed, 2) {
  on_both_backends([&] {
    Scale net;
    DistributedDataParallel<Scale> model(net);
    model.join([&] {
      for (int step = 0; step < 2 + 2 * world.rank; ++step) {
        if (step % 2 == 0) {
          auto guard = model.no_sync();
          model(1.0).backward();
        } else {
          model(1.0).backward();
          if (step == 3) {
            // The sum is 2 on rank 1, averaged over two ranks.
            EXPECT_FLOAT_EQ(net->factor.grad()[0].item<float>(), 1);
          }
          net->zero_grad();
        }
      }
    });
  });
}

WORLD_TEST(Join, EarlyTerminationNamesTheRankOnAll, 2, 3) {
  on_both_backends([&] {
    Scale net;
    DistributedDataParallel<Scale> model(net);
    EXPECT_THAT(
        [&] {
          model.join(
              [&] {
                for (int step = 0; step < (world.rank == 1 ? 1 : 3); ++step) {
                  model(1.0).backward();
                }
              },
              {.throw_on_early_termination = true});
        },
        ThrowsMessage<std::runtime_error>(
            AllOf(HasSubstr("rank 1"), HasSubstr("no more inputs"))));
    // The group still works.
    auto one = torch::ones({1});
    all_reduce(one);
    EXPECT_EQ(one.item<float>(), world.size);
  });
}

WORLD_TEST(Join, DisabledItDoesNothing, 2) {
  on_both_backends([&] {
    Scale net;
    DistributedDataParallel<Scale> model(net);
    model.join([&] { model(world.rank + 1.0).backward(); }, {.enable = false});
    EXPECT_FLOAT_EQ(net->factor.grad()[0].item<float>(), 1.5);
  });
}

// Each rank averaged by its own option.
WORLD_TEST(Join, OptionsThatDifferAreNamedOnAllRanks, 2, 3) {
  on_both_backends([&] {
    Scale net;
    DistributedDataParallel<Scale> model(net);
    const bool last = world.rank == world.size - 1;
    const auto joins = [&](const JoinOptions& options, int steps) {
      model.join(
          [&] {
            for (int step = 0; step < steps; ++step) model(1.0).backward();
          },
          options);
    };
    for (const int steps : {1, world.rank}) {
      EXPECT_THAT(
          [&] { joins({.divide_by_initial_world_size = !last}, steps); },
          ThrowsMessage<std::invalid_argument>(
              HasSubstr("JoinOptions::divide_by_initial_world_size")));
      EXPECT_THAT([&] { joins({.throw_on_early_termination = last}, steps); },
                  ThrowsMessage<std::invalid_argument>(
                      HasSubstr("JoinOptions::throw_on_early_termination")));
    }
  });
}

WORLD_TEST(Join, NothingToJoinIsAMistake, 1) {
  EXPECT_THAT([] { join({}, [] {}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("nothing")));
  EXPECT_THAT([] { join({nullptr}, [] {}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("is null")));
}

}  // namespace
}  // namespace lockstep::internal

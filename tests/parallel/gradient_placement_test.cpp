// DistributedDataParallelOptions::place_gradients: large gradients are reduced
// where backward computes them. Whatever autograd does with their memory, the
// averages must be those of one process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/init.h"
#include "lockstep/optim/adam.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/rank_averages.h"

namespace lockstep::internal::testing {
namespace {

using torch::nn::Linear, torch::nn::Sequential, torch::nn::Tanh;

// 128 KiB of float64 for each square weight, which is placed; 1 KiB for a bias,
// which is not.
constexpr int64_t kWide = 128;

Tensor wide_rows(int rank, int step = 0) {
  torch::manual_seed(1000 * step + rank + 1);
  return torch::randn({6, kWide}, doubles());
}

Sequential wide_net(at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(3);
  Sequential net(Linear(kWide, kWide), Tanh(), Linear(kWide, kWide), Tanh(),
                 Linear(kWide, kWide));
  net->to(dtype);
  return net;
}

auto wide_loss(Sequential& net, int step = 0) {
  return [&net, step](int rank) {
    return net->forward(wide_rows(rank, step)).square().sum();
  };
}

// The bucket refers to its view, too; only the parameter refers to a gradient
// that lies elsewhere.
bool lies_in_bucket(const Tensor& gradient) { return gradient.use_count() > 1; }

WORLD_TEST(GradientPlacement, LargeGradientsStayWhereTheyWereComputed, 2, 3) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net);
  const auto parameters = net->parameters();
  for (int step = 0; step < 5; ++step) {
    net->zero_grad();
    model(wide_rows(world.rank, step)).square().sum().backward();
    expect_gradients(parameters,
                     averages(world.size, parameters, wide_loss(net, step)),
                     "placed");
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(is_shared(parameter.grad()));
      EXPECT_EQ(lies_in_bucket(parameter.grad()), parameter.dim() == 1)
          << "step " << step << ", " << parameter.sizes();
    }
  }
}

WORLD_TEST(GradientPlacement, OffItIsInTheBucket, 2) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net, {.place_gradients = false});
  const auto parameters = net->parameters();
  model(wide_rows(world.rank)).square().sum().backward();
  for (const auto& parameter : parameters) {
    EXPECT_TRUE(lies_in_bucket(parameter.grad()));
  }
}

WORLD_TEST(GradientPlacement, AccumulationIsRightInEveryOrder, 2, 3) {
  auto group = init_process_group("lockstep");
  for (const bool sets_to_none : {true, false}) {
    auto net = wide_net();
    DistributedDataParallel<Sequential> model(net);
    const auto parameters = net->parameters();
    for (int round = 0; round < 4; ++round) {
      net->zero_grad(sets_to_none);
      auto expected = averages(world.size, parameters, wide_loss(net, 0));
      for (auto& one : expected) one *= 0;
      for (int part = 0; part <= round; ++part) {
        const auto last = part == round;
        const int step = 10 * round + part;
        const auto mean =
            averages(world.size, parameters, wide_loss(net, step));
        for (size_t i = 0; i < mean.size(); ++i) expected[i] += mean[i];
        const auto train = [&] {
          model(wide_rows(world.rank, step)).square().sum().backward();
        };
        if (last) {
          train();
        } else {
          auto guard = model.no_sync();
          train();
        }
      }
      expect_gradients(parameters, expected, "accumulated");
    }
  }
}

// A backward that adds to averaged gradients averages them again with all.
WORLD_TEST(GradientPlacement, ABackwardAddsToAveragedGradients, 2) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net);
  const auto parameters = net->parameters();
  Gradients expected;
  for (int step = 0; step < 3; ++step) {
    model(wide_rows(world.rank, step)).square().sum().backward();
    const auto mean = averages(world.size, parameters, wide_loss(net, step));
    for (size_t i = 0; i < mean.size(); ++i) {
      step == 0 ? expected.push_back(mean[i]) : void(expected[i] += mean[i]);
    }
    expect_gradients(parameters, expected, "added");
  }
}

// Parameters that meet in one node, so that their gradients are views of one
// result, or one tensor.
struct MeetingImpl : torch::nn::Module {
  MeetingImpl() {
    torch::manual_seed(5);
    for (const char* name : {"a", "b", "c", "d"}) {
      all.push_back(
          register_parameter(name, torch::randn({kWide, kWide}, doubles())));
    }
  }
  Tensor forward(const Tensor& input, int way) {
    const auto flat = [](const Tensor& t) { return t.view({-1}); };
    switch (way) {
      case 0:  // one result for both, by two views
        return input.matmul(
                   (flat(all[0]) + flat(all[1])).view({kWide, kWide})) *
               (input.matmul(all[2]) + input.matmul(all[3]));
      case 1:  // the same tensor for both
        return input.matmul(all[0] + all[1]) * input.matmul(all[2] - all[3]);
      case 2:  // parts of one result
        return input.matmul(torch::cat({all[0], all[1], all[2], all[3]}, 1))
            .tanh();
      case 3:  // stacked, and used twice
        return torch::matmul(input, torch::stack(all)).sum(0) *
               input.matmul(all[1]);
      default:  // expanded gradients
        return (all[0].sum() * all[1].mean() + all[2].sum() * all[3].sum()) *
               input.sum();
    }
  }
  std::vector<Tensor> all;
};
TORCH_MODULE(Meeting);

WORLD_TEST(GradientPlacement, ParametersThatMeetInANodeKeepTheirGradients, 2,
           3) {
  auto group = init_process_group("lockstep");
  for (int way = 0; way < 5; ++way) {
    SCOPED_TRACE(way);
    Meeting net;
    DistributedDataParallel<Meeting> model(net);
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(step % 2 == 0);
      auto before = Gradients();
      for (const auto& p : net->all) {
        before.push_back(p.grad().defined() ? p.grad().clone()
                                            : torch::zeros_like(p));
      }
      const auto loss = [&](const Tensor& output) {
        return output.square().sum() / 1e4;
      };
      loss(model(wide_rows(world.rank, step) / 10, way)).backward();
      auto expected = averages(world.size, net->all, [&](int rank) {
        return loss(net->forward(wide_rows(rank, step) / 10, way));
      });
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
      expect_gradients(net->all, expected, "met");
    }
  }
}

WORLD_TEST(GradientPlacement, UsersMayShareAndKeepGradients, 2) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net);
  auto parameters = net->parameters();
  const auto expected = [&](int step) {
    return averages(world.size, parameters, wide_loss(net, step));
  };
  const auto train = [&](int step) {
    model(wide_rows(world.rank, step)).square().sum().backward();
  };
  train(0);
  train(1);
  // A view and a reference that outlive zero_grad() keep their values.
  const auto view = parameters[0].grad().view({-1});
  const auto kept = parameters[2].grad();
  const auto copy = view.clone(), kept_copy = kept.clone();
  net->zero_grad();
  train(2);
  expect_gradients(parameters, expected(2), "beside kept gradients");
  EXPECT_TRUE(view.equal(copy));
  EXPECT_TRUE(kept.equal(kept_copy));
  // One tensor as the gradient of two parameters: both backwards add to it.
  net->zero_grad();
  train(3);
  parameters[0].mutable_grad().zero_();
  parameters[2].mutable_grad() = parameters[0].grad();
  auto sums = expected(4);
  train(4);
  const auto both = sums[0] + sums[2];
  EXPECT_TRUE(torch::allclose(parameters[0].grad(), both) ||
              torch::allclose(parameters[0].grad(), sums[0]))
      << "neither the sum nor its own";
  // Swapped gradients.
  net->zero_grad();
  train(5);
  std::swap(parameters[0].mutable_grad(), parameters[2].mutable_grad());
  auto swapped = expected(5);
  std::swap(swapped[0], swapped[2]);
  train(6);
  const auto more = expected(6);
  for (size_t i = 0; i < more.size(); ++i) swapped[i] += more[i];
  expect_gradients(parameters, swapped, "swapped");
}

// Keeps what autograd has added to a gradient.
class Keep final : public torch::autograd::FunctionPostHook {
 public:
  explicit Keep(Tensor& kept) : kept_(kept) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& inputs) override {
    kept_ = inputs[0];
    return outputs;
  }

 private:
  Tensor& kept_;
};

// The hook comes after the wrapper's, when the gradient may be with the peers.
WORLD_TEST(GradientPlacement, ALaterHookKeepsTheLocalGradient, 2) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net);
  const auto parameters = net->parameters();
  Tensor kept;
  torch::autograd::impl::grad_accumulator(parameters[0])
      ->add_post_hook(std::make_unique<Keep>(kept));
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    model(wide_rows(world.rank, step)).square().sum().backward();
    expect_gradients(parameters,
                     averages(world.size, parameters, wide_loss(net, step)),
                     "with a hook");
    const auto local =
        gradients(wide_loss(net, step)(world.rank), parameters)[0];
    EXPECT_TRUE(torch::allclose(kept, local)) << "step " << step;
    EXPECT_TRUE(lies_in_bucket(parameters[0].grad()));
  }
}

// A lazy clone has a storage of its own, but copies its memory only when one of
// the two is written.
WORLD_TEST(GradientPlacement, ALazilyClonedGradientKeepsItsValues, 2) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net);
  const auto parameters = net->parameters();
  Tensor kept;
  parameters[0].register_hook([&](const Tensor& gradient) {
    kept = gradient;
    return at::_lazy_clone(gradient);
  });
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const auto expected =
        averages(world.size, parameters, wide_loss(net, step));
    const auto local =
        gradients(wide_loss(net, step)(world.rank), parameters)[0];
    model(wide_rows(world.rank, step)).square().sum().backward();
    expect_gradients(parameters, expected, "cloned lazily");
    EXPECT_TRUE(torch::allclose(kept, local)) << "step " << step;
  }
}

WORLD_TEST(GradientPlacement, AnExceptionOnOneRankHarmsNoLaterGradient, 2) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net);
  const auto parameters = net->parameters();
  for (int step = 0; step < 6; ++step) {
    net->zero_grad();
    auto output = model(wide_rows(world.rank, step));
    bool failed = false;
    if (step % 2 == 1) {
      unsigned hook = 0;
      if (world.rank == 0) {
        hook = parameters[0].register_hook([](const Tensor&) -> Tensor {
          throw std::runtime_error("of this test");
        });
      }
      try {
        output.square().sum().backward();
      } catch (const std::exception&) {
        failed = true;
      }
      EXPECT_TRUE(failed);
      if (world.rank == 0) parameters[0].remove_hook(hook);
      continue;
    }
    output.square().sum().backward();
    expect_gradients(parameters,
                     averages(world.size, parameters, wide_loss(net, step)),
                     "after an exception");
  }
}

WORLD_TEST(GradientPlacement, DerivativesOfGradientsAreNotPlaced, 2) {
  auto group = init_process_group("lockstep");
  auto net = wide_net();
  DistributedDataParallel<Sequential> model(net);
  const auto parameters = net->parameters();
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    model(wide_rows(world.rank, step))
        .square()
        .sum()
        .backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    expect_gradients(parameters,
                     averages(world.size, parameters, wide_loss(net, step)),
                     "with create_graph");
  }
}

// Bit for bit, with every dtype that is placed.
WORLD_TEST(GradientPlacement, TrainsBitForBitAsWithout, 2, 3) {
  auto group = init_process_group("lockstep");
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    std::vector<std::vector<Tensor>> ends;
    for (const bool placed : {true, false}) {
      torch::manual_seed(1);
      Sequential net(Linear(kWide, 4 * kWide), Tanh(),
                     Linear(4 * kWide, 4 * kWide), Tanh(),
                     Linear(4 * kWide, 1));
      net->to(dtype);
      DistributedDataParallel<Sequential> model(net,
                                                {.place_gradients = placed});
      optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        model(wide_rows(world.rank, step).to(dtype)).square().mean().backward();
        optimizer.step();
      }
      ends.push_back(net->parameters());
    }
    for (size_t i = 0; i < ends[0].size(); ++i) {
      EXPECT_TRUE(ends[0][i].equal(ends[1][i])) << dtype << ", " << i;
    }
  }
}

WORLD_TEST(GradientPlacement, ShardedOptimizersTrainBitForBitAsWithout, 2, 3) {
  auto group = init_process_group("lockstep");
  for (const auto& options : std::vector<ZeroRedundancyOptions>{
           {}, {.shared_parameters = true}, {.step_in_backward = true}}) {
    std::vector<std::vector<Tensor>> ends;
    for (const bool placed : {true, false}) {
      auto net = wide_net(at::kFloat);
      DistributedDataParallel<Sequential> model(net,
                                                {.place_gradients = placed});
      ZeroRedundancyOptimizer<optim::AdamW> optimizer(model, {.lr = 1e-2},
                                                      options);
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        model(wide_rows(world.rank, step).to(at::kFloat))
            .square()
            .mean()
            .backward();
        optimizer.step();
      }
      optimizer.synchronize();
      std::vector<Tensor> end;
      for (const auto& p : net->parameters()) end.push_back(p.detach().clone());
      ends.push_back(std::move(end));
    }
    for (size_t i = 0; i < ends[0].size(); ++i) {
      EXPECT_TRUE(ends[0][i].equal(ends[1][i])) << i;
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing

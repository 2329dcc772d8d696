// The effects of DistributedDataParallel's options, on shared memory and on
// Gloo.

#include "lockstep/parallel/ddp/ddp_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::on_both_backends;
using ::testing::ThrowsMessage;
using testing::World;

// Returns a row of x for each rank, so the bias' gradient is this rank's share.
torch::Tensor rows(int count = 1) { return torch::ones({count, 2}); }

WORLD_TEST(DdpViews, WithoutThemGradientsStayTheirOwn, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(
        net, {.gradient_as_bucket_view = false});
    torch::Tensor kept;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(rows() * (world.rank + step)).sum().backward();
      EXPECT_TRUE(
          torch::allclose(net->weight.grad(), torch::full({1, 2}, 0.5 + step)));
      if (kept.defined()) {
        EXPECT_TRUE(torch::allclose(kept, torch::full({1, 2}, step - 0.5)));
      }
      kept = net->weight.grad();
    }
    // Accumulates a second backward, too.
    model(rows() * world.rank).sum().backward();
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({1, 2}, 3.0)));
  });
}

WORLD_TEST(DdpIgnored, ParametersAndBuffersStayLocal, 2) {
  on_both_backends([&] {
    torch::nn::Sequential net(torch::nn::Linear(2, 2),
                              torch::nn::BatchNorm1d(2));
    {
      at::NoGradGuard no_grad;
      for (auto& p : net->parameters()) p.fill_(world.rank + 1.0);
      for (auto& b : net->buffers()) b.fill_(world.rank + 1);
    }
    DistributedDataParallel<torch::nn::Sequential> model(
        net, {.params_and_buffers_to_ignore = {"1.weight", "1.running_mean"}});
    EXPECT_EQ(net->named_parameters()["0.bias"][0].item<float>(), 1);
    EXPECT_EQ(net->named_parameters()["1.weight"][0].item<float>(),
              world.rank + 1);
    EXPECT_EQ(net->named_buffers()["1.running_mean"][0].item<float>(),
              world.rank + 1);
    EXPECT_EQ(net->named_buffers()["1.running_var"][0].item<float>(), 1);
    EXPECT_THAT(
        [&] {
          DistributedDataParallel<torch::nn::Sequential> wrong(
              net, {.params_and_buffers_to_ignore = {"2.weight"}});
        },
        ThrowsMessage<std::invalid_argument>(HasSubstr("'2.weight'")));
  });
}

WORLD_TEST(DdpSparse, EmbeddingsKeepSparseGradients, 2, 3) {
  on_both_backends([&] {
    torch::nn::Embedding words(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    torch::nn::Sequential net(words, torch::nn::Linear(2, 1));
    DistributedDataParallel<torch::nn::Sequential> model(net);
    for (int step = 0; step < 3; ++step) {
      auto want = torch::zeros({6, 2});
      for (int rank = 0; rank < world.size; ++rank) {
        auto out = net->forward(torch::tensor({rank, 5})).sum();
        want += torch::autograd::grad({out}, {words->weight})[0].to_dense() /
                world.size;
      }
      net->zero_grad();
      model(torch::tensor({world.rank, 5})).sum().backward();
      ASSERT_TRUE(words->weight.grad().is_sparse());
      EXPECT_TRUE(torch::allclose(words->weight.grad().to_dense(), want));
    }
  });
}

WORLD_TEST(DdpDtypes, ComplexAndHalfParametersAreAveraged, 2) {
  on_both_backends([&] {
    struct MixImpl : torch::nn::Module {
      MixImpl() {
        complex = register_parameter("complex",
                                     torch::ones({2}, torch::kComplexFloat));
        half = register_parameter("half", torch::ones({2}, torch::kHalf));
        brain = register_parameter("brain", torch::ones({2}, torch::kBFloat16));
        wide = register_parameter("wide", torch::ones({2}, torch::kDouble));
      }
      torch::Tensor forward(double x) {
        return at::real(complex * c10::complex<double>(x, 2 * x)).sum() +
               (half * x).sum() + (brain * x).sum() + (wide * x).sum();
      }
      torch::Tensor complex, half, brain, wide;
    };
    auto net = std::make_shared<MixImpl>();
    DistributedDataParallel<std::shared_ptr<MixImpl>> model(net);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(world.rank + 1.0).backward();
      // The gradient of Re(z w) is the conjugate of w.
      auto complex = net->complex.grad()[0].item<c10::complex<double>>();
      EXPECT_DOUBLE_EQ(complex.real(), 1.5);
      EXPECT_DOUBLE_EQ(complex.imag(), -3);
      EXPECT_EQ(net->half.grad()[0].item<double>(), 1.5);
      EXPECT_EQ(net->brain.grad()[0].item<double>(), 1.5);
      EXPECT_EQ(net->wide.grad()[0].item<double>(), 1.5);
      EXPECT_EQ(net->half.grad().scalar_type(), torch::kHalf);
    }
  });
}

WORLD_TEST(DdpModel, AParameterUsedTwiceCountsOnce, 2) {
  on_both_backends([&] {
    torch::nn::Linear shared(2, 2);
    struct TwiceImpl : torch::nn::Module {
      explicit TwiceImpl(torch::nn::Linear layer) {
        part = register_module("part", std::move(layer));
      }
      torch::Tensor forward(const torch::Tensor& x) { return part(part(x)); }
      torch::nn::Linear part{nullptr};
    };
    auto net = std::make_shared<TwiceImpl>(shared);
    DistributedDataParallel<std::shared_ptr<TwiceImpl>> model(net);
    auto want = torch::zeros({2});
    for (int rank = 0; rank < world.size; ++rank) {
      want += torch::autograd::grad({net->forward(rows() * rank).sum()},
                                    {shared->bias})[0] /
              world.size;
    }
    model(rows() * world.rank).sum().backward();
    EXPECT_TRUE(torch::allclose(shared->bias.grad(), want));
  });
}

WORLD_TEST(DdpModel, SeveralInOneProcess, 2) {
  on_both_backends([&] {
    torch::nn::Linear first(2, 2), second(2, 1);
    DistributedDataParallel<torch::nn::Linear> one(first);
    DistributedDataParallel<torch::nn::Linear> two(second);
    for (int step = 0; step < 3; ++step) {
      first->zero_grad();
      second->zero_grad();
      two(one(rows() * (world.rank + 1))).sum().backward();
      auto want = torch::zeros({1, 2});
      for (int rank = 0; rank < world.size; ++rank) {
        want += first->forward(rows() * (rank + 1)) / world.size;
      }
      EXPECT_TRUE(torch::allclose(second->weight.grad(), want));
      EXPECT_FLOAT_EQ(second->bias.grad().item<float>(), 1);
      EXPECT_TRUE(torch::allclose(first->bias.grad(), second->weight[0]));
    }
  });
}

WORLD_TEST(DdpModel, FrozenAndLaterUnfrozenParametersFollow, 2) {
  on_both_backends([&] {
    torch::nn::Linear first(2, 2), second(2, 1);
    torch::nn::Sequential net(first, second);
    first->weight.requires_grad_(false);
    DistributedDataParallel<torch::nn::Sequential> model(net);
    auto step = [&] {
      net->zero_grad();
      (model(rows()).sum() * (world.rank + 1)).backward();
      EXPECT_FLOAT_EQ(second->bias.grad().item<float>(), 1.5);
    };
    step();
    EXPECT_FALSE(first->weight.grad().defined());
    first->weight.requires_grad_(true);
    for (int i = 0; i < 3; ++i) {
      step();
      EXPECT_TRUE(torch::allclose(
          first->weight.grad()[0],
          second->weight[0][0].detach() * 1.5 * torch::ones({2})));
    }
    first->weight.requires_grad_(false);
    first->bias.requires_grad_(false);
    for (int i = 0; i < 2; ++i) step();
    size_t members = 0;
    for (const auto& bucket : model.bucket_names()) members += bucket.size();
    EXPECT_EQ(members, 2U);
    EXPECT_EQ(model.get_ddp_logging_data().iteration, 6);
  });
}

WORLD_TEST(DdpModel, AnotherDtypeBehindConstructionIsFollowed, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(net);
    model(rows() * world.rank).sum().backward();
    net->zero_grad();
    net->to(torch::kDouble);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      model(rows().to(torch::kDouble) * world.rank).sum().backward();
      EXPECT_EQ(net->weight.grad().scalar_type(), torch::kDouble);
      EXPECT_DOUBLE_EQ(net->weight.grad()[0][0].item<double>(), 0.5);
    }
  });
}

WORLD_TEST(DdpMixedPrecision, TrainsInBfloat16AndStepsInFloat32, 2) {
  on_both_backends([&] {
    torch::nn::Sequential net(torch::nn::Linear(2, 4), torch::nn::Tanh(),
                              torch::nn::Linear(4, 1));
    DistributedDataParallel<torch::nn::Sequential> model(
        net,
        {.mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16}});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      {
        const c10::InferenceMode inference;
        EXPECT_EQ(model(rows()).scalar_type(), torch::kBFloat16);
      }
      auto out = model(rows() * (world.rank + 1.0));
      EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
      out.sum().backward();
      std::vector<at::Tensor> want;
      for (const auto& p : net->parameters()) {
        EXPECT_EQ(p.scalar_type(), torch::kFloat);
        EXPECT_EQ(p.grad().scalar_type(), torch::kFloat);
        want.push_back(torch::zeros_like(p));
      }
      for (int rank = 0; rank < world.size; ++rank) {
        auto grads = torch::autograd::grad(
            {net->forward(rows() * (rank + 1.0)).sum()}, net->parameters());
        for (size_t i = 0; i < want.size(); ++i) {
          want[i] += grads[i] / world.size;
        }
      }
      for (size_t i = 0; i < want.size(); ++i) {
        // bfloat16 has 8 bits of mantissa; the product passes three layers.
        EXPECT_TRUE(
            torch::allclose(net->parameters()[i].grad(), want[i], 4e-2, 1e-2))
            << net->parameters()[i].grad() << want[i];
      }
      optimizer.step();
    }
    at::NoGradGuard no_grad;
    model(rows());
    EXPECT_EQ(net->parameters()[0].scalar_type(), torch::kFloat);
  });
}

WORLD_TEST(DdpMixedPrecision, ABackwardThroughTwoForwardsNeedsAStaticGraph, 2) {
  on_both_backends([&] {
    for (const bool is_static : {false, true}) {
      torch::nn::Linear net(1, 1);
      DistributedDataParallel<torch::nn::Linear> model(
          net,
          {.static_graph = is_static,
           .mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const auto x = torch::full({1, 1}, world.rank + 1.0);
        auto both = (model(x) + model(2 * x)).sum();
        if (!is_static) {
          EXPECT_THAT([&] { both.backward(); },
                      ThrowsMessage<std::runtime_error>(HasSubstr(
                          "a backward may go through one forward only")));
          break;
        }
        both.backward();
        EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 4.5);
      }
    }
  });
}

WORLD_TEST(DdpMixedPrecision, GradientsAreReducedInTheDtypeAskedFor, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(
        net,
        {.mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16,
                                           .reduce_dtype = torch::kFloat}});
    for (int step = 0; step < 2; ++step) {
      // The gradients accumulate in float32: 256 + 1 would be 256 in bfloat16.
      (model(rows()).sum() * (step == 0 ? 256.0 : 1.0)).backward();
    }
    EXPECT_EQ(net->bias.grad().item<float>(), 257);
  });
}

WORLD_TEST(DdpOptimizerInBackward, StepsWhenItsGradientIsAveraged, 2) {
  on_both_backends([&] {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 1));
    torch::nn::Sequential same(torch::nn::Linear(2, 3),
                               torch::nn::Linear(3, 1));
    DistributedDataParallel<torch::nn::Sequential> model(net);
    {
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        same->parameters()[i].copy_(net->parameters()[i]);
      }
    }
    DistributedDataParallel<torch::nn::Sequential> plain(same);
    model.apply_optimizer_in_backward([](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::SGD>(
          std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
    });
    torch::optim::SGD optimizer(same->parameters(),
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      model(rows() * (world.rank + step)).sum().backward();
      optimizer.zero_grad();
      plain(rows() * (world.rank + step)).sum().backward();
      optimizer.step();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_FALSE(net->parameters()[i].grad().defined());
        EXPECT_TRUE(net->parameters()[i].equal(same->parameters()[i]));
      }
    }
  });
}

WORLD_TEST(DdpHealth, ANanNamesRankParameterAndStep, 2, 3) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(
        net, {.check_for_nan_in_grad = true});
    model(rows()).sum().backward();
    model(rows()).sum().backward();
    auto x = rows();
    if (world.rank == 1) x[0][1] = std::numeric_limits<float>::infinity();
    net->zero_grad();
    // The weight's gradient equals the input.
    EXPECT_THAT([&] { model(x).sum().backward(); },
                ThrowsMessage<std::runtime_error>(AllOf(
                    HasSubstr("'weight' on rank 1"), HasSubstr("step 2"))));
    net->zero_grad();
    EXPECT_NO_THROW(model(rows()).sum().backward());
  });
}

WORLD_TEST(DdpHealth, DriftedReplicasNameRankAndParameter, 3) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(
        net, {.check_replicas_every = 2});
    auto step = [&] { model(rows()).sum().backward(); };
    for (int i = 0; i < 4; ++i) step();
    if (world.rank == 2) {
      at::NoGradGuard no_grad;
      net->bias += 1e-6;
    }
    EXPECT_THAT(
        [&] {
          for (int i = 0; i < 2; ++i) step();
        },
        ThrowsMessage<std::runtime_error>(HasSubstr("'bias' of rank 2")));
  });
}

WORLD_TEST(DdpHook, ReplacesTheReductionOfEachBucket, 2) {
  on_both_backends([&] {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 1));
    DistributedDataParallel<torch::nn::Sequential> model(
        net, {.bucket_cap_mb = 1e-6});
    std::vector<size_t> calls;
    int last = 0;
    model.register_comm_hook([&](GradBucket& bucket) {
      calls.push_back(bucket.index());
      if (bucket.is_last()) ++last;
      EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
      all_reduce(bucket.buffer());  // the sum: not divided
      return completed_future(bucket.buffer());
    });
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      model(rows()).sum().backward();
      EXPECT_FLOAT_EQ(net->parameters()[3].grad().item<float>(), world.size);
    }
    EXPECT_THAT(calls, ElementsAre(0, 0, 1, 2, 3));
    EXPECT_EQ(last, 2);
    EXPECT_THAT([&] { model.register_comm_hook(CommHook()); },
                ThrowsMessage<std::invalid_argument>(HasSubstr("empty")));
  });
}

WORLD_TEST(DdpHook, MayAskItsModule, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel<torch::nn::Linear> model(net);
    int64_t iterations = -1;
    size_t buckets = 0;
    model.register_comm_hook([&](GradBucket& bucket) {
      iterations = model.get_ddp_logging_data().iteration;
      buckets = model.bucket_names().size();
      return completed_future(bucket.buffer());
    });
    model(rows()).sum().backward();
    EXPECT_EQ(iterations, 0);
    EXPECT_EQ(buckets, 1U);
  });
}

WORLD_TEST(DdpHook, AFutureThatStaysAwayEndsBackward, 1) {
  auto group = init_process_group("gloo");
  auto brief = new_group({}, {.timeout = std::chrono::milliseconds(50)});
  torch::nn::Linear net(2, 1);
  DistributedDataParallel<torch::nn::Linear> model(net,
                                                   {.process_group = brief});
  bool stays_away = true;
  auto never = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  model.register_comm_hook([&](GradBucket& bucket) {
    return stays_away ? never : completed_future(bucket.buffer());
  });
  EXPECT_THAT([&] { model(rows()).sum().backward(); },
              ThrowsMessage<c10::DistBackendError>(
                  HasSubstr("future for bucket 0 was not complete")));
  // The hook may still write into the bucket, so no backward may begin.
  EXPECT_THAT([&] { model(rows()); },
              ThrowsMessage<c10::DistBackendError>(HasSubstr("bucket 0")));
  never->markCompleted(torch::zeros({3}));
  stays_away = false;
  net->zero_grad();
  model(rows()).sum().backward();
  EXPECT_FLOAT_EQ(net->bias.grad().item<float>(),
                  static_cast<float>(rows().size(0)));
}

WORLD_TEST(DdpLogging, TellsOptionsBucketsAndTimes, 2) {
  on_both_backends([&] {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 1));
    DistributedDataParallel<torch::nn::Sequential> model(
        net, {.bucket_cap_mb = 1e-6});
    for (int step = 0; step < 3; ++step) model(rows()).sum().backward();
    const auto data = model.get_ddp_logging_data();
    EXPECT_EQ(data.world_size, 2);
    EXPECT_EQ(data.rank, world.rank);
    EXPECT_EQ(data.iteration, 3);
    EXPECT_EQ(data.num_parameter_tensors, 4);
    EXPECT_EQ(data.total_parameter_size_bytes, (6 + 3 + 3 + 1) * 4);
    EXPECT_TRUE(data.has_rebuilt_buckets);
    EXPECT_EQ(data.num_buckets, 4);
    EXPECT_EQ(data.prev_iteration_grad_ready_order_indices.size(), 4U);
    EXPECT_THAT(data.dtypes, ElementsAre("Float"));
    EXPECT_TRUE(data.can_set_static_graph);
    EXPECT_GT(data.forward_compute_time, 0);
    EXPECT_GT(data.backward_compute_time, 0);
    EXPECT_GT(data.backward_comm_time, 0);
    EXPECT_LE(data.backward_compute_comm_overlap_time, data.backward_comm_time);
    EXPECT_GT(data.avg_backward_comm_time, 0);
  });
}

WORLD_TEST(DdpOptions, MistakesAreNamed, 1) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    auto wrap = [&](const DistributedDataParallelOptions& options) {
      return [=] {
        DistributedDataParallel<torch::nn::Linear> model(net, options);
      };
    };
    EXPECT_THAT(wrap({.bucket_cap_mb = -2}),
                ThrowsMessage<std::invalid_argument>(HasSubstr("-2")));
    EXPECT_THAT(wrap({.skip_all_reduce_unused_params = true}),
                ThrowsMessage<std::invalid_argument>(
                    HasSubstr("find_unused_parameters")));
    EXPECT_THAT(
        wrap({.mixed_precision = MixedPrecision{.param_dtype = torch::kLong}}),
        ThrowsMessage<std::invalid_argument>(HasSubstr("Long")));
    EXPECT_THAT(wrap({.check_replicas_every = -1}),
                ThrowsMessage<std::invalid_argument>(
                    HasSubstr("check_replicas_every")));
  });
}

// The ranks waited for each other in different collectives, or were told that
// their calls differ, without the option.
WORLD_TEST(DdpOptions, ThoseThatDifferAreNamedOnAllRanks, 2, 3) {
  using Options = DistributedDataParallelOptions;
  const std::pair<const char*, Options> others[] = {
      {"broadcast_buffers = 0", {.broadcast_buffers = false}},
      {"forward_sync_buffers = 0", {.forward_sync_buffers = false}},
      {"bucket_cap_mb = 2", {.bucket_cap_mb = 2}},
      {"first_bucket_mb = 2", {.first_bucket_mb = 2}},
      {"gradient_as_bucket_view = 0", {.gradient_as_bucket_view = false}},
      {"place_gradients = 0", {.place_gradients = false}},
      {"find_unused_parameters = 1", {.find_unused_parameters = true}},
      {"static_graph = 1", {.static_graph = true}},
      {"params_and_buffers_to_ignore = {bias}",
       {.params_and_buffers_to_ignore = {"bias"}}},
      {"mixed_precision.param_dtype = BFloat16",
       {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}},
      {"check_for_nan_in_grad = 1", {.check_for_nan_in_grad = true}},
      {"check_replicas_every = 3", {.check_replicas_every = 3}}};
  on_both_backends([&] {
    torch::nn::Linear net(2, 1);
    for (const auto& [words, other] : others) {
      const bool differs = world.rank == world.size - 1;
      EXPECT_THAT(
          [&] {
            DistributedDataParallel<torch::nn::Linear> model(
                net, differs ? other : Options());
          },
          ThrowsMessage<std::invalid_argument>(
              AllOf(HasSubstr("the ranks' options differ: rank 0 has "),
                    HasSubstr(c10::str("rank ", world.size - 1, " has ", words,
                                       "; give all ranks the same options")))));
    }
    DistributedDataParallel<torch::nn::Linear> model(net);
    model(at::ones({1, 2})).sum().backward();
  });
}

}  // namespace
}  // namespace lockstep::internal

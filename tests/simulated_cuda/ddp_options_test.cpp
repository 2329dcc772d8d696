// DistributedDataParallel with each of its options trains on devices with the
// numbers of the CPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using testing::append_state;
using testing::bound_of_sums;
using testing::expect_as_on_cpu;
using ::testing::HasSubstr;
using testing::kDeviceBackend;
using testing::kDeviceType;
using ::testing::ThrowsMessage;
using testing::World;
using torch::Tensor;

constexpr int kSteps = 4;

// Layers with a buffer, a weight that is used twice, a branch that iterations
// may leave out, a frozen parameter, and one of another dtype.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(11);
    first = register_module("first", torch::nn::Linear(6, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    second = register_module("second", torch::nn::Linear(16, 16));
    branch = register_module("branch", torch::nn::Linear(16, 16));
    to(torch::kDouble);
    frozen =
        register_parameter("frozen", torch::randn({16}, torch::kDouble), false);
    narrow = register_parameter("narrow", torch::randn({16}));
  }
  Tensor forward(const Tensor& x, bool takes_branch = true,
                 bool checkpointed = false) {
    Tensor h = norm(first(x)).tanh();
    if (checkpointed) {
      h = checkpoint([this](const Tensor& part) { return second(part).tanh(); },
                     h);
    } else {
      h = second(h).tanh();
    }
    h = second(h) * frozen;
    if (takes_branch) h = h + branch(h).tanh();
    return (h * narrow).sum(1);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, branch{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  Tensor frozen, narrow;
};

using Ddp = DistributedDataParallel<std::shared_ptr<NetImpl>>;

struct Variant {
  std::string name;
  DistributedDataParallelOptions options{};
  std::function<bool(int rank, int step)> takes_branch{};
  int micro_batches = 1;
  bool sets_to_none = true;
  bool in_backward = false;
  bool checkpointed = false;
};

std::vector<Variant> variants() {
  const auto on_some = [](int rank, int step) {
    return (rank + step) % 3 == 0;
  };
  const auto never = [](int, int) { return false; };
  std::vector<Variant> all;
  for (const double cap : {1e-5, 1e-3, 25.0}) {
    for (const bool views : {true, false}) {
      all.push_back(
          {.name = "buckets of " + std::to_string(cap) +
                   (views ? ", views" : ", copies"),
           .options = {.bucket_cap_mb = cap, .gradient_as_bucket_view = views},
           .micro_batches = cap < 1 ? 1 : 3,
           .sets_to_none = cap < 1e-4});
    }
  }
  all.push_back(
      {.name = "find_unused_parameters",
       .options = {.bucket_cap_mb = 1e-3, .find_unused_parameters = true},
       .takes_branch = on_some});
  all.push_back({.name = "find_unused_parameters, copies",
                 .options = {.bucket_cap_mb = 1e-3,
                             .gradient_as_bucket_view = false,
                             .find_unused_parameters = true},
                 .takes_branch = on_some,
                 .micro_batches = 2,
                 .sets_to_none = false});
  all.push_back({.name = "skip_all_reduce_unused_params",
                 .options = {.bucket_cap_mb = 1e-3,
                             .find_unused_parameters = true,
                             .skip_all_reduce_unused_params = true},
                 .takes_branch = never});
  all.push_back({.name = "static_graph, checkpointed",
                 .options = {.bucket_cap_mb = 1e-3, .static_graph = true},
                 .takes_branch = never,
                 .checkpointed = true});
  all.push_back({.name = "checks",
                 .options = {.bucket_cap_mb = 1e-3,
                             .check_for_nan_in_grad = true,
                             .check_replicas_every = 2},
                 .micro_batches = 2});
  all.push_back({.name = "no buffers, no init_sync",
                 .options = {.broadcast_buffers = false, .init_sync = false}});
  all.push_back({.name = "optimizers in backward",
                 .options = {.bucket_cap_mb = 1e-3},
                 .in_backward = true});
  all.push_back(
      {.name = "bfloat16",
       .options = {.bucket_cap_mb = 1e-3,
                   .mixed_precision =
                       MixedPrecision{.param_dtype = torch::kBFloat16,
                                      .reduce_dtype = torch::kFloat,
                                      .buffer_dtype = torch::kBFloat16}},
       .micro_batches = 2});
  return all;
}

std::vector<Tensor> train(const Variant& variant, const World& world,
                          const at::Device& device) {
  auto net = std::make_shared<NetImpl>();
  net->to(device);
  {
    const torch::NoGradGuard no_grad;
    if (variant.options.init_sync) {
      for (Tensor& parameter : net->parameters()) parameter.add_(world.rank);
    }
  }
  Ddp model(net, variant.options);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  const torch::optim::SGDOptions options =
      torch::optim::SGDOptions(0.05).momentum(0.9);
  if (variant.in_backward) {
    model.apply_optimizer_in_backward([&](std::vector<Tensor> parameters) {
      return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                                 options);
    });
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), options);
  }
  torch::manual_seed(100 + world.rank);
  std::vector<Tensor> results;
  for (int step = 0; step < kSteps; ++step) {
    if (optimizer) optimizer->zero_grad(variant.sets_to_none);
    for (int micro = 1; micro <= variant.micro_batches; ++micro) {
      const Tensor x = torch::randn({5, 6}, torch::kDouble).to(device);
      const auto loss = [&] {
        return model(x,
                     !variant.takes_branch ||
                         variant.takes_branch(world.rank, step),
                     variant.checkpointed)
            .square()
            .mean();
      };
      Tensor one;
      if (micro < variant.micro_batches) {
        const auto guard = model.no_sync();
        one = loss();
        one.backward();
      } else {
        one = loss();
        one.backward();
      }
      results.push_back(one.detach());
    }
    append_state(*net, results);
    if (optimizer) optimizer->step();
  }
  EXPECT_EQ(net->first->weight.device(), device);
  return results;
}

WORLD_TEST(DdpOnDevices, TrainsWithTheNumbersOfTheCpu, 2, 3) {
  const auto all = variants();
  for (const bool mixed : {false, true}) {
    expect_as_on_cpu(
        [&](const at::Device& device) {
          std::vector<Tensor> results;
          for (const Variant& variant : all) {
            if (variant.options.mixed_precision.has_value() != mixed) continue;
            for (Tensor& one : train(variant, world, device)) {
              results.push_back(std::move(one));
            }
          }
          return results;
        },
        // For three ranks the parameter in float32, or bfloat16, is rounded
        // another way.
        bound_of_sums(world, mixed ? 0.1 : 1e-4));
  }
}

WORLD_TEST(DdpOnDevices, RanksWithoutInputsShadowTheOthers, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        std::vector<Tensor> results;
        for (const bool views : {true, false}) {
          for (const bool by_size : {true, false}) {
            auto net = std::make_shared<NetImpl>();
            net->to(device);
            Ddp model(
                net, {.bucket_cap_mb = 1e-3, .gradient_as_bucket_view = views});
            torch::optim::SGD optimizer(net->parameters(), 0.05);
            torch::manual_seed(100 + world.rank);
            model.join(
                [&] {
                  for (int step = 0; step < 2 + world.rank; ++step) {
                    optimizer.zero_grad();
                    const Tensor x =
                        torch::randn({5, 6}, torch::kDouble).to(device);
                    model(x).square().mean().backward();
                    optimizer.step();
                  }
                },
                {.divide_by_initial_world_size = by_size});
            for (const Tensor& parameter : net->parameters()) {
              results.push_back(parameter.detach());
            }
          }
        }
        return results;
      },
      // Sums are divided by the number of ranks that train, which may be no
      // power of 2.
      1e-4);
}

// NCCL's error came at the end of the first backward, without the parameter.
// Lockstep does not know which tensors a registered backend takes.
WORLD_TEST(DdpOnDevices, SparseGradientsAreRefusedWithWhatToDo, 1, 2) {
  const auto group = init_process_group("cpu:lockstep," + kDeviceBackend);
  using torch::nn::Embedding;
  const auto wrap = [](torch::Device device, bool trained) {
    torch::nn::Sequential net(
        Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)),
        torch::nn::Linear(4, 2));
    net->to(device);
    net[0]->as<Embedding>()->weight.requires_grad_(trained);
    DistributedDataParallel<torch::nn::Sequential> model(net);
  };
  EXPECT_NO_THROW(wrap(torch::kCPU, true));
  EXPECT_NO_THROW(wrap(local_device(), false));
  if (world.size == 1 || kDeviceType != c10::kCUDA) {
    EXPECT_NO_THROW(wrap(local_device(), true));
    return;
  }
  EXPECT_THAT([&] { wrap(local_device(), true); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("'0.weight' is sparse"),
                        HasSubstr("sparse(false)"), HasSubstr("gloo"))));
}

struct Thrown : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw Thrown("backward");
  }
};

// All ranks give up the iteration, and the next one is averaged again.
WORLD_TEST(DdpOnDevices, AnIterationThatThrowsIsGivenUp, 2, 3) {
  for (const bool in_forward : {true, false}) {
    expect_as_on_cpu(
        [&](const at::Device& device) {
          auto net = std::make_shared<NetImpl>();
          net->to(device);
          Ddp model(net, {.bucket_cap_mb = 1e-3});
          torch::optim::SGD optimizer(net->parameters(), 0.05);
          torch::manual_seed(100 + world.rank);
          std::vector<Tensor> results;
          for (int step = 0; step < 5; ++step) {
            optimizer.zero_grad();
            const Tensor x = torch::randn({5, 6}, torch::kDouble)
                                 .to(device)
                                 .requires_grad_();
            try {
              const Tensor in =
                  step == 2 && !in_forward ? ThrowInBackward::apply(x) : x;
              const Tensor out = model(in);
              if (step == 2 && in_forward) throw Thrown("forward");
              out.square().mean().backward();
              optimizer.step();
            } catch (const Thrown&) {
            }
          }
          for (const Tensor& parameter : net->parameters()) {
            results.push_back(parameter.detach());
          }
          return results;
        },
        bound_of_sums(world, 1e-4));
  }
}

}  // namespace
}  // namespace lockstep::internal

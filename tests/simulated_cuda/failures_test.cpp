// Ranks on devices that fail alone, or have tensors where NCCL takes none.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using testing::bound_of_sums;
using testing::expect_as_on_cpu;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class LostIn { none, forward, loss, backward };

struct LoseBackward : torch::autograd::Function<LoseBackward> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw Lost("backward");
  }
};

struct FragileImpl : torch::nn::Module {
  FragileImpl() {
    torch::manual_seed(9);
    first = register_module("first", Linear(6, 8));
    last = register_module("last", Linear(8, 2));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = first(x).tanh();
    if (place == LostIn::forward) throw Lost("forward");
    if (place == LostIn::backward) h = LoseBackward::apply(h);
    return last(h);
  }
  LostIn place = LostIn::none;
  Linear first{nullptr}, last{nullptr};
};

// All ranks lose the iteration 2: on the CPU because all of them throw, on a
// device because the last rank throws and the others get NaN for it.
std::vector<Tensor> lose_an_iteration(LostIn place, const World& world,
                                      const at::Device& device) {
  auto net = std::make_shared<FragileImpl>();
  net->to(device);
  DistributedDataParallel<std::shared_ptr<FragileImpl>> model(
      net, {.bucket_cap_mb = 1e-5});
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  torch::manual_seed(100 + world.rank);
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    const bool lost = step == 2;
    const bool throws =
        lost && (device.is_cpu() || world.rank == world.size - 1);
    net->place = throws ? place : LostIn::none;
    const Tensor x = torch::randn({5, 6}, torch::kDouble).to(device);
    try {
      const Tensor loss = model(x).square().mean();
      if (throws && place == LostIn::loss) throw Lost("loss");
      loss.backward();
      EXPECT_FALSE(throws);
    } catch (const Lost&) {
      EXPECT_TRUE(throws);
      continue;
    }
    if (lost) {
      EXPECT_TRUE(net->first->weight.grad().isnan().all().item<bool>());
    } else {
      optimizer.step();
    }
  }
  return testing::values_of(net->parameters());
}

WORLD_TEST(FailuresOnDevices, PeersOfARankThatGaveUpGetNaN, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        std::vector<Tensor> results;
        for (const LostIn place :
             {LostIn::forward, LostIn::loss, LostIn::backward}) {
          SCOPED_TRACE(static_cast<int>(place));
          for (Tensor& one : lose_an_iteration(place, world, device)) {
            results.push_back(std::move(one));
          }
        }
        return results;
      },
      bound_of_sums(world));
}

// Parameters on the CPU and on the device, each with its backend.
WORLD_TEST(FailuresOnDevices, AModelMayBeOnTheDeviceAndTheCpu, 2, 3) {
  const auto train = [&](const at::Device& device) {
    torch::manual_seed(9);
    Linear first(6, 8), last(8, 2);
    last->to(device);
    struct Both : torch::nn::Module {
      Both(const Linear& on_cpu, const Linear& on_device)
          : first(register_module("first", on_cpu)),
            last(register_module("last", on_device)) {}
      Tensor forward(const Tensor& x) {
        return last(first(x).tanh().to(last->weight.device()));
      }
      Linear first, last;
    };
    auto net = std::make_shared<Both>(first, last);
    DistributedDataParallel<std::shared_ptr<Both>> model(
        net, {.bucket_cap_mb = 1e-5});
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    torch::manual_seed(100 + world.rank);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      model(torch::randn({5, 6})).square().mean().backward();
      optimizer.step();
    }
    return testing::values_of(net->parameters());
  };
  std::vector<Tensor> expected;
  {
    const auto group = init_process_group("lockstep");
    expected = train(at::kCPU);
  }
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    simulated_cuda::restart(seed);
    const auto group = init_process_group("cpu:lockstep,cuda:nccl");
    const auto results = train(local_device());
    ASSERT_EQ(results.size(), expected.size());
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(results[i].cpu().allclose(expected[i], 1e-4, 1e-5))
          << "seed " << seed << ", result " << i;
    }
  }
}

Sequential net_on(const at::Device& device) {
  torch::manual_seed(5);
  Sequential net(Linear(6, 8), torch::nn::Tanh(), Linear(8, 2));
  net->to(device);
  return net;
}

// The module of rank 1 is on the GPU of rank 0, as after to("cuda:0") on all
// ranks. Only rank 1 threw, in its first collective, where the others waited.
WORLD_TEST(FailuresOnDevices, AModelOnTheGpuOfAnotherRankIsRefusedOnAllRanks, 2,
           3) {
  const auto group =
      init_process_group("nccl", {.timeout = std::chrono::seconds(40)});
  const torch::Device device("cuda:0");
  const auto refusal = ThrowsMessage<std::invalid_argument>(
      AllOf(HasSubstr("rank 1"), HasSubstr("0.weight"),
            HasSubstr("on cuda:0, not on local_device(), cuda:1"),
            ::testing::Not(HasSubstr("\n"))));
  EXPECT_THAT(
      [&] { DistributedDataParallel<Sequential> model(net_on(device)); },
      refusal);
  EXPECT_THAT([&] { FullyShard<Sequential> model(net_on(device)); }, refusal);
  // The group is whole.
  const Tensor sum = torch::ones({3}, local_device());
  all_reduce(sum);
  EXPECT_EQ(sum.sum().item<float>(), 3 * world.size);
}

// A model of which each rank has a half on a second GPU.
WORLD_TEST(FailuresOnDevices, AModelOnTwoGpusIsRefused, 2) {
  const auto group =
      init_process_group("nccl", {.timeout = std::chrono::seconds(40)});
  auto net = net_on(local_device());
  net[2]->to(torch::Device(torch::kCUDA, 4 + world.rank));
  EXPECT_THAT([&] { DistributedDataParallel<Sequential> model(net); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("'2.weight' of Float[2, 8] on cuda:4, not on "
                                  "local_device(), cuda:0"),
                        HasSubstr("cuda:5"))));
}

// Gives this rank the GPU of another local rank.
class AsLocalRank {
 public:
  explicit AsLocalRank(int rank) : before_(std::getenv("LOCAL_RANK")) {
    ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  }
  AsLocalRank(const AsLocalRank&) = delete;
  AsLocalRank& operator=(const AsLocalRank&) = delete;
  ~AsLocalRank() { ::setenv("LOCAL_RANK", before_.c_str(), 1); }

 private:
  const std::string before_;
};

WORLD_TEST(FailuresOnDevices, TwoRanksOnOneGpuAreRefused, 2, 3) {
  const auto train = [] {
    const auto group =
        init_process_group("nccl", {.timeout = std::chrono::seconds(40)});
    DistributedDataParallel<Sequential> model(net_on(local_device()));
    model(torch::ones({2, 6}, local_device())).sum().backward();
  };
  {
    const AsLocalRank same(world.rank == 0 ? 0 : world.rank - 1);
    // Not a matcher, which calls the function again to explain a mismatch.
    std::string said = "nothing was thrown";
    try {
      train();
    } catch (const c10::DistBackendError& error) {
      said = error.what_without_backtrace();
    }
    EXPECT_THAT(said, HasSubstr("Duplicate GPU detected : rank 1 and rank 0 "
                                "both on CUDA device 0"));
  }
  train();
}

}  // namespace
}  // namespace lockstep::internal

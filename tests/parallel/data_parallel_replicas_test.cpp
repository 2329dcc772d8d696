// How DataParallel keeps replicas, and how their threads behave.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const DataParallelOptions kTwoReplicas{.device_ids = {at::kCPU, at::kCPU}};

// How often all instances together were cloned.
std::atomic<int> clones{0};

struct CountingImpl : torch::nn::Cloneable<CountingImpl> {
  CountingImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", torch::nn::Linear(3, 2));
  }
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device) const override {
    ++clones;
    return Cloneable::clone(device);
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Counting);

TEST(DataParallelReplicas, AreNotClonedInEachStep) {
  clones = 0;
  DataParallel<Counting> model(Counting(), kTwoReplicas);
  torch::optim::Adam optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    model(torch::ones({4, 3})).sum().backward();
    optimizer.step();
  }
  EXPECT_EQ(clones, 1);
}

TEST(DataParallelReplicas, AreMadeAgainForAModuleWithOtherChildren) {
  torch::nn::Sequential net(torch::nn::Linear(3, 3));
  DataParallel<torch::nn::Sequential> model(net, kTwoReplicas);
  auto x = torch::ones({4, 3});
  // Computes in halves like the replicas, because a product of more rows may be
  // rounded differently.
  const auto expected = [&] {
    return torch::cat(
        {net->forward(x.slice(0, 0, 2)), net->forward(x.slice(0, 2, 4))});
  };
  EXPECT_TRUE(model(x).equal(expected()));
  net->push_back(torch::nn::Tanh());
  EXPECT_TRUE(model(x).equal(expected()));
  net->push_back(torch::nn::Linear(3, 1));
  EXPECT_TRUE(model(x).equal(expected()));
}

TEST(DataParallelReplicas, TakeNoRandomNumbers) {
  torch::nn::Linear linear(3, 3);
  torch::manual_seed(5);
  auto without = torch::rand({4});
  torch::manual_seed(5);
  DataParallel<torch::nn::Linear> model(linear, kTwoReplicas);
  EXPECT_TRUE(torch::rand({4}).equal(without));
}

TEST(DataParallelReplicas, ShareTheModulesParameters) {
  torch::nn::Linear linear(3, 3);
  Replicas replicas(*linear, {at::kCPU, at::kCPU});
  replicas.refresh(*linear, 2);
  auto& replica = dynamic_cast<torch::nn::LinearImpl&>(replicas[1]);
  EXPECT_EQ(replica.weight.data_ptr(), linear->weight.data_ptr());
  EXPECT_FALSE(replica.weight.is_leaf());
  // Both also share the version counter, so autograd notices that a tensor
  // which the replica saved has changed.
  auto out = replica.forward(torch::ones({2, 3}, at::requires_grad())).sum();
  {
    torch::NoGradGuard no_grad;
    linear->weight.mul_(2);
  }
  EXPECT_THROW(out.backward(), c10::Error);
}

// Replicas on other devices behave like this; here the CPU is the other device.
TEST(DataParallelReplicas, WithMemoryOfTheirOwnFollowTheModule) {
  torch::nn::Linear linear(3, 3);
  Replicas replicas(*linear, {at::kCPU, at::kCPU}, ReplicaMemory::kOwn);
  auto& replica = dynamic_cast<torch::nn::LinearImpl&>(replicas[1]);
  auto x = torch::ones({2, 3});
  torch::optim::SGD optimizer(linear->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    replicas.refresh(*linear, 2);
    EXPECT_NE(replica.weight.data_ptr(), linear->weight.data_ptr());
    EXPECT_TRUE(replica.forward(x).equal(linear(x)));
    linear->zero_grad();
    replica.forward(x).sum().backward();
    auto got = linear->weight.grad().clone();
    linear->zero_grad();
    linear(x).sum().backward();
    EXPECT_TRUE(got.equal(linear->weight.grad()));
    optimizer.step();
  }
  // If the module is unchanged, a refresh keeps what a replica's graph has
  // saved; after a change, autograd notices the refresh.
  auto input = torch::ones({2, 3}, at::requires_grad());
  replicas.refresh(*linear, 2);
  auto out = replica.forward(input).sum();
  replicas.refresh(*linear, 2);
  EXPECT_NO_THROW(out.backward());
  auto stale = replica.forward(input).sum();
  {
    torch::NoGradGuard no_grad;
    linear->weight.mul_(2);
  }
  replicas.refresh(*linear, 2);
  EXPECT_THROW(stale.backward(), c10::Error);
}

TEST(DataParallelReplicas, WithMemoryOfTheirOwnMustNotBeWritten) {
  torch::nn::Linear linear(3, 3);
  Replicas replicas(*linear, {at::kCPU, at::kCPU}, ReplicaMemory::kOwn);
  replicas.refresh(*linear, 2);
  EXPECT_NO_THROW(replicas.require_unwritten());
  {
    const torch::NoGradGuard no_grad;
    replicas[1].named_parameters()["bias"].mul_(2);
  }
  EXPECT_THROW(replicas.require_unwritten(), std::logic_error);
  replicas.refresh(*linear, 2);
  EXPECT_NO_THROW(replicas.require_unwritten());
}

TEST(DataParallelReplicas, ModuleWithoutCloneIsNamed) {
  struct PlainImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  EXPECT_THAT(message_of([] {
                DataParallel<std::shared_ptr<PlainImpl>> model(
                    std::make_shared<PlainImpl>(), kTwoReplicas);
              }),
              AllOf(HasSubstr("PlainImpl"), HasSubstr("Cloneable")));
  EXPECT_THAT(message_of([] {
                DataParallel<torch::nn::Sequential> model(
                    torch::nn::Sequential(std::make_shared<PlainImpl>()),
                    kTwoReplicas);
              }),
              AllOf(HasSubstr("Sequential"), HasSubstr("PlainImpl")));
}

// LibTorch's Cloneable leaves such a child as reset() made it.
TEST(DataParallelReplicas, ChildWithoutCloneHasTheModulesParameters) {
  struct InnerImpl : torch::nn::Module {
    InnerImpl() { weight = register_parameter("weight", torch::randn({2})); }
    at::Tensor weight;
  };
  struct OuterImpl : torch::nn::Cloneable<OuterImpl> {
    OuterImpl() { reset(); }
    void reset() override {
      inner = register_module("inner", std::make_shared<InnerImpl>());
    }
    at::Tensor forward(const at::Tensor& x) { return x * inner->weight; }
    std::shared_ptr<InnerImpl> inner;
  };
  auto module = std::make_shared<OuterImpl>();
  DataParallel<std::shared_ptr<OuterImpl>> model(module, kTwoReplicas);
  auto x = torch::randn({4, 2});
  EXPECT_TRUE(model(x).equal(module->forward(x)));
}

TEST(DataParallelReplicas, CloneThatSharesParametersIsRefused) {
  struct ShallowImpl : torch::nn::Module {
    ShallowImpl() { weight = register_parameter("weight", torch::ones({2})); }
    std::shared_ptr<torch::nn::Module> clone(
        const std::optional<torch::Device>&) const override {
      return std::make_shared<ShallowImpl>(*this);
    }
    at::Tensor forward(const at::Tensor& x) { return x * weight; }
    at::Tensor weight;
  };
  EXPECT_THAT(message_of([] {
                DataParallel<std::shared_ptr<ShallowImpl>> model(
                    std::make_shared<ShallowImpl>(), kTwoReplicas);
              }),
              HasSubstr("no weight of its own"));
}

struct OwnError {};

// Throws `kind` in the replicas whose first element is marked.
struct ThrowingImpl : torch::nn::Cloneable<ThrowingImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x, const std::string& kind) {
    if (x[0].item<float>() != 0) {
      const auto text = "row " + std::to_string(x[0].item<int>());
      if (kind == "invalid_argument") throw std::invalid_argument(text);
      if (kind == "c10") TORCH_CHECK_INDEX(false, text);
      if (kind == "own") throw OwnError();
    }
    return x;
  }
};
TORCH_MODULE(Throwing);

class DataParallelErrors : public ::testing::Test {
 protected:
  DataParallel<Throwing> model{Throwing(),
                               {.device_ids = {at::kCPU, at::kCPU, at::kCPU}}};
};

TEST_F(DataParallelErrors, NameReplicaAndDevice) {
  EXPECT_EQ(message_of([&] {
              model(torch::tensor({0.f, 1.f, 0.f}), "invalid_argument");
            }),
            "Caught std::invalid_argument in replica 1 on device cpu.\n"
            "Original message: row 1");
  // The threads still work.
  EXPECT_TRUE(
      model(torch::zeros({3}), "invalid_argument").equal(torch::zeros({3})));
}

TEST_F(DataParallelErrors, TheFirstOfSeveralReplicasCounts) {
  for (int round = 0; round < 20; ++round) {
    EXPECT_THAT(message_of([&] {
                  model(torch::tensor({0.f, 1.f, 2.f}), "invalid_argument");
                }),
                HasSubstr("replica 1"));
  }
}

TEST_F(DataParallelErrors, OfLibTorchKeepTheirType) {
  try {
    model(torch::tensor({0.f, 0.f, 2.f}), "c10");
    FAIL();
  } catch (const c10::IndexError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("row 2"),
                      HasSubstr("Caught c10::IndexError in replica 2 on "
                                "device cpu.")));
  }
}

TEST_F(DataParallelErrors, OfOtherTypesAreNested) {
  try {
    model(torch::tensor({5.f, 0.f, 0.f}), "own");
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("in replica 0 on device cpu."));
    EXPECT_THROW(std::rethrow_if_nested(error), OwnError);
  }
}

TEST(ReplicaThreads, HaveTheirShareOfIntraOpThreadsAndTheCallerKeepsItsOwn) {
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  for (const auto& [asked, got] : {std::pair(0, 2), std::pair(3, 3)}) {
    ReplicaThreads threads({at::kCPU, at::kCPU}, asked);
    std::array<int, 2> seen{};
    threads.run(2, [&](size_t i) { seen[i] = at::get_num_threads(); });
    EXPECT_EQ(seen[0], got);
    EXPECT_EQ(seen[1], got);
    EXPECT_EQ(at::get_num_threads(), 4);
    int later = 0;
    std::thread([&] { later = at::get_num_threads(); }).join();
    EXPECT_EQ(later, 4);
  }
  at::set_num_threads(before);
  EXPECT_THROW(DataParallel<Counting>(Counting(), {.device_ids = {at::kCPU},
                                                   .intra_op_threads = -1}),
               std::invalid_argument);
}

TEST(ReplicaThreads, StayFromCallToCall) {
  ReplicaThreads threads({at::kCPU, at::kCPU}, 1);
  std::array<std::thread::id, 2> first{}, second{};
  threads.run(2, [&](size_t i) { first[i] = std::this_thread::get_id(); });
  threads.run(2, [&](size_t i) { second[i] = std::this_thread::get_id(); });
  EXPECT_EQ(first, second);
  EXPECT_NE(first[0], first[1]);
}

}  // namespace
}  // namespace lockstep::internal::testing

// Compares DataParallel with the module itself on the whole batch.

#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const DataParallelOptions kTwo{.device_ids = {at::kCPU, at::kCPU}};
const DataParallelOptions kThree{.device_ids = {at::kCPU, at::kCPU, at::kCPU}};

// Returns integers, whose products and sums are exact in any order.
at::Tensor whole_numbers(at::IntArrayRef sizes) {
  return torch::randint(-4, 5, sizes, torch::kFloat64);
}

torch::nn::Linear whole_linear() {
  torch::nn::Linear linear(3, 2);
  linear->to(torch::kFloat64);
  torch::NoGradGuard no_grad;
  linear->weight.copy_(whole_numbers({2, 3}));
  linear->bias.copy_(whole_numbers({2}));
  return linear;
}

torch::nn::Sequential small_net() {
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(),
                            torch::nn::Linear(8, 2));
  net->to(torch::kFloat64);
  return net;
}

template <typename Module>
Module twin(const Module& module) {
  return Module(std::dynamic_pointer_cast<typename Module::ContainedType>(
      module->clone()));
}

template <typename A, typename B>
void expect_same_gradients(const A& a, const B& b, double bound = 0) {
  auto of_b = b.named_parameters();
  for (const auto& parameter : a.named_parameters()) {
    const auto& other = of_b[parameter.key()];
    ASSERT_EQ(parameter->grad().defined(), other.grad().defined())
        << parameter.key();
    if (!other.grad().defined()) continue;
    const auto off = (parameter->grad() - other.grad()).abs().max();
    EXPECT_LE(off.template item<double>(), bound) << parameter.key();
  }
}

TEST(DataParallel, ForwardAndBackwardAreThoseOfTheWholeBatch) {
  for (const auto& options : {kTwo, kThree}) {
    for (int64_t rows : {1, 2, 3, 4, 5, 7, 12}) {
      SCOPED_TRACE(rows);
      auto module = whole_linear();
      auto single = twin(module);
      DataParallel<torch::nn::Linear> model(module, options);
      auto x = whole_numbers({rows, 3}).requires_grad_();
      auto x_single = x.detach().clone().requires_grad_();
      auto out = model(x);
      auto expected = single(x_single);
      EXPECT_TRUE(out.equal(expected));
      out.square().sum().backward();
      expected.square().sum().backward();
      expect_same_gradients(*module, *single);
      EXPECT_TRUE(x.grad().equal(x_single.grad()));
      EXPECT_TRUE(module->weight.is_leaf());
    }
  }
}

TEST(DataParallel, GradientsHaveTheSameBitsEachTime) {
  torch::manual_seed(1);
  DataParallel<torch::nn::Sequential> model(small_net(), kThree);
  auto x = torch::randn({9, 6}, torch::kFloat64);
  std::vector<at::Tensor> first;
  for (int round = 0; round < 20; ++round) {
    model->zero_grad();
    // Uses up sequence numbers, so the nodes of the calling thread get others.
    for (int i = 0; i < round; ++i) {
      torch::ones({1}, at::requires_grad()).exp();
    }
    model(x).exp().sum().backward();
    std::vector<at::Tensor> now;
    for (auto& parameter : model->parameters()) {
      now.push_back(parameter.grad().clone());
    }
    if (first.empty()) first = now;
    for (size_t i = 0; i < now.size(); ++i) {
      EXPECT_TRUE(now[i].equal(first[i])) << round;
    }
  }
}

template <typename Optimizer, typename Options>
void expect_trains_as_one(Options optimizer_options) {
  torch::manual_seed(2);
  auto module = small_net();
  auto single = twin(module);
  DataParallel<torch::nn::Sequential> model(module, kThree);
  Optimizer optimizer(model->parameters(), optimizer_options);
  Optimizer optimizer_single(single->parameters(), optimizer_options);
  for (int step = 0; step < 15; ++step) {
    auto x = torch::randn({10, 6}, torch::kFloat64);
    auto y = torch::randn({10, 2}, torch::kFloat64);
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    optimizer_single.zero_grad();
    torch::mse_loss(model(x), y).backward();
    torch::mse_loss(single->forward(x), y).backward();
    optimizer.step();
    optimizer_single.step();
  }
  auto of_single = single->parameters();
  auto of_model = model->parameters();
  for (size_t i = 0; i < of_single.size(); ++i) {
    EXPECT_LE((of_model[i] - of_single[i]).abs().max().item<double>(), 1e-12);
  }
}

TEST(DataParallel, TrainsAsOneWithSgd) {
  expect_trains_as_one<torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9));
}
TEST(DataParallel, TrainsAsOneWithAdam) {
  expect_trains_as_one<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
}

TEST(DataParallel, BatchNormKeepsTheFirstReplicasStatistics) {
  torch::nn::BatchNorm1d module(4);
  auto first_alone = twin(module);
  // Uses as many threads as the caller, because batch norm sums by thread.
  DataParallel<torch::nn::BatchNorm1d> model(
      module, {.device_ids = {at::kCPU, at::kCPU},
               .intra_op_threads = at::get_num_threads()});
  for (int step = 0; step < 3; ++step) {
    auto x = torch::randn({8, 4});
    auto out = model(x);
    auto expected = first_alone(x.slice(0, 0, 4));
    EXPECT_TRUE(out.slice(0, 0, 4).equal(expected));
    EXPECT_TRUE(module->running_mean.equal(first_alone->running_mean));
    EXPECT_TRUE(module->running_var.equal(first_alone->running_var));
    EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), step + 1);
  }
  // In evaluation mode every replica uses those statistics.
  model->eval();
  first_alone->eval();
  auto x = torch::randn({8, 4});
  EXPECT_TRUE(model(x).equal(first_alone(x)));
}

TEST(DataParallel, BatchNormAllowsSeveralForwardsBeforeBackward) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  DataParallel<torch::nn::Sequential> model(net, kTwo);
  auto a = model(torch::randn({6, 4}));
  auto b = model(torch::randn({6, 4}));
  EXPECT_NO_THROW(a.sum().backward());
  EXPECT_NO_THROW(b.sum().backward());
}

TEST(DataParallel, RepeatedForwardsAccumulateAsInOne) {
  auto module = whole_linear();
  auto single = twin(module);
  DataParallel<torch::nn::Linear> model(module, kTwo);
  auto first = whole_numbers({4, 3});
  auto second = whole_numbers({6, 3});
  auto a = model(first).square().sum();
  auto b = model(second).square().sum();
  b.backward();
  a.backward();
  (single(first).square().sum() + single(second).square().sum()).backward();
  expect_same_gradients(*module, *single);
}

TEST(DataParallel, StepBetweenForwardAndBackwardIsNoticed) {
  DataParallel<torch::nn::Sequential> model(small_net(), kTwo);
  auto x = torch::randn({4, 6}, torch::kFloat64);
  auto stale = model(x).sum();
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.mul_(2);
  }
  EXPECT_THROW(stale.backward(), c10::Error);
}

TEST(DataParallel, FrozenParametersFollowTheModule) {
  auto module = whole_linear();
  auto single = twin(module);
  DataParallel<torch::nn::Linear> model(module, kTwo);
  auto x = whole_numbers({4, 3});
  for (bool trained : {true, false, true}) {
    for (auto* linear : {&module, &single}) {
      (*linear)->weight.requires_grad_(trained);
      (*linear)->zero_grad();
    }
    model(x).square().sum().backward();
    single(x).square().sum().backward();
    EXPECT_EQ(module->weight.grad().defined(), trained);
    expect_same_gradients(*module, *single);
  }
  for (auto& parameter : module->parameters()) parameter.requires_grad_(false);
  EXPECT_FALSE(model(x).requires_grad());
}

TEST(DataParallel, GradModeAndTrainingModeReachTheReplicas) {
  torch::nn::Sequential net(torch::nn::Linear(3, 3),
                            torch::nn::Dropout(/*p=*/1.0));
  DataParallel<torch::nn::Sequential> model(net, kTwo);
  auto x = torch::ones({4, 3});
  EXPECT_EQ(model(x).count_nonzero().item<int64_t>(), 0);
  model->eval();
  // Computes in halves like the replicas, because a product of more rows may be
  // rounded differently.
  EXPECT_TRUE(model(x).equal(torch::cat(
      {net->forward(x.slice(0, 0, 2)), net->forward(x.slice(0, 2, 4))})));
  EXPECT_TRUE(model(x).requires_grad());
  {
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(model(x).requires_grad());
  }
  {
    c10::InferenceMode inference;
    EXPECT_TRUE(model(x).is_inference());
  }
  EXPECT_TRUE(model(x).requires_grad());
  model->train();
  EXPECT_EQ(model(x).count_nonzero().item<int64_t>(), 0);
}

TEST(DataParallel, AutocastReachesTheReplicas) {
  DataParallel<torch::nn::Linear> model(torch::nn::Linear(3, 3), kTwo);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  auto out = model(torch::ones({4, 3}));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(model(torch::ones({4, 3})).scalar_type(), at::kFloat);
}

TEST(DataParallel, HigherDerivativesGoThroughTheReplicas) {
  auto module = small_net();
  auto single = twin(module);
  DataParallel<torch::nn::Sequential> model(module, kTwo);
  auto x = torch::randn({4, 6}, torch::kFloat64);
  auto penalty = [&](auto&& forward, torch::nn::SequentialImpl& of) {
    auto parameters = of.parameters();
    auto gradients = torch::autograd::grad(
        {forward(x).square().sum()}, parameters, {}, /*retain_graph=*/true,
        /*create_graph=*/true);
    at::Tensor sum = torch::zeros({}, torch::kFloat64);
    for (auto& gradient : gradients) sum = sum + gradient.square().sum();
    sum.backward();
  };
  penalty(model, *module);
  penalty([&](auto& input) { return single->forward(input); }, *single);
  expect_same_gradients(*module, *single, 1e-10);
}

TEST(DataParallel, HooksOfTheModulesParametersSeeTheSum) {
  auto module = whole_linear();
  auto single = twin(module);
  DataParallel<torch::nn::Linear> model(module, kTwo);
  std::vector<at::Tensor> seen;
  module->weight.register_hook(
      [&](const at::Tensor& gradient) { seen.push_back(gradient.clone()); });
  auto x = whole_numbers({4, 3});
  model(x).square().sum().backward();
  single(x).square().sum().backward();
  ASSERT_THAT(seen, SizeIs(1));
  EXPECT_TRUE(seen[0].equal(single->weight.grad()));
}

TEST(DataParallel, MovedModuleIsFollowed) {
  auto module = whole_linear();
  DataParallel<torch::nn::Linear> model(module, kTwo);
  model(whole_numbers({4, 3})).sum().backward();
  module->to(torch::kFloat32);
  module->zero_grad();
  auto x = whole_numbers({4, 3}).to(torch::kFloat32);
  auto out = model(x);
  EXPECT_TRUE(out.equal(module(x)));
  out.sum().backward();
  EXPECT_EQ(module->weight.grad().scalar_type(), at::kFloat);
}

TEST(DataParallel, TiedWeightsGetTheWholeGradient) {
  struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
    TiedImpl() { reset(); }
    void reset() override {
      weight =
          register_parameter("weight", torch::ones({3, 3}, torch::kFloat64));
      same = register_parameter("same", weight);
    }
    at::Tensor forward(const at::Tensor& x) {
      return x.matmul(weight).matmul(same);
    }
    at::Tensor weight, same;
  };
  auto module = std::make_shared<TiedImpl>();
  auto single = std::make_shared<TiedImpl>();
  DataParallel<std::shared_ptr<TiedImpl>> model(module, kThree);
  auto x = whole_numbers({6, 3});
  model(x).sum().backward();
  single->forward(x).sum().backward();
  EXPECT_TRUE(module->weight.grad().equal(single->weight.grad()));
}

TEST(DataParallel, BackwardOutlivesTheWrapper) {
  auto module = whole_linear();
  auto single = twin(module);
  auto x = whole_numbers({4, 3});
  at::Tensor out;
  {
    DataParallel<torch::nn::Linear> model(module, kTwo);
    out = model(x);
  }
  out.square().sum().backward();
  single(x).square().sum().backward();
  expect_same_gradients(*module, *single);
}

struct CheckpointedImpl : torch::nn::Cloneable<CheckpointedImpl> {
  explicit CheckpointedImpl(CheckpointOptions given) : options(given) {
    reset();
  }
  void reset() override {
    weight = register_parameter("weight", torch::ones({3}, torch::kFloat64));
  }
  at::Tensor forward(const at::Tensor& x) {
    return checkpoint(
        options,
        [w = weight, random = options.preserve_rng_state](const at::Tensor& t) {
          const auto y = t * w;
          return (random ? torch::dropout(y, 0.5, true) : y).tanh();
        },
        x);
  }
  CheckpointOptions options;
  at::Tensor weight;
};
TORCH_MODULE(Checkpointed);

// Regression: another replica drew from the generator of the CPU between the
// state that a checkpointed call kept and its dropout, so the recomputation
// dropped other elements.
TEST(DataParallel, CheckpointsThatPreserveTheGeneratorAreRefusedOnCpus) {
  Checkpointed net(CheckpointOptions{});
  DataParallel<Checkpointed> model(net, kTwo);
  const auto rows = [](int64_t count) {
    return torch::ones({count, 3}, torch::kFloat64).requires_grad_();
  };
  EXPECT_THAT([&] { model(rows(4)); },
              ::testing::ThrowsMessage<std::invalid_argument>(
                  HasSubstr("set preserve_rng_state to false")));
  {
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(model(rows(4)).size(0), 4);
  }
  // One replica is alone with the generator.
  const auto x = rows(1);
  const auto y = model(x);
  y.sum().backward();
  EXPECT_TRUE((y == 0).equal(x.grad() == 0));
}

TEST(DataParallel, CheckpointsWithoutRandomNumbersWorkOnCpus) {
  Checkpointed net(CheckpointOptions{.preserve_rng_state = false});
  DataParallel<Checkpointed> model(net, kTwo);
  auto same = twin(net);
  const auto x = torch::ones({4, 3}, torch::kFloat64);
  model(x).sum().backward();
  same->forward(x).sum().backward();
  expect_same_gradients(*net, *same, 1e-12);
}

TEST(DataParallel, WithoutGpusAndDevicesForwardIsTheModules) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there are GPUs";
  auto module = whole_linear();
  DataParallel<torch::nn::Linear> model(module);
  EXPECT_THAT(model.device_ids(), IsEmpty());
  auto x = whole_numbers({4, 3});
  EXPECT_TRUE(model(x).equal(module(x)));
}

TEST(DataParallel, OneDeviceIsAPlainForward) {
  struct MeanImpl : torch::nn::Module {  // not cloneable, and need not be
    at::Tensor forward(const at::Tensor& x) { return x.mean(); }
  };
  DataParallel<std::shared_ptr<MeanImpl>> model(std::make_shared<MeanImpl>(),
                                                {.device_ids = {at::kCPU}});
  EXPECT_EQ(model(torch::ones({4})).dim(), 0);
}

struct InPlaceImpl : torch::nn::Cloneable<InPlaceImpl> {
  InPlaceImpl() { reset(); }
  void reset() override { linear = register_module("linear", whole_linear()); }
  at::Tensor forward(const at::Tensor& x) { return linear(x.relu_()); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(InPlace);

// Regression: the first replica's relu_() changed the caller's tensor without a
// word to autograd. What was computed from it before and afterwards got wrong
// gradients.
TEST(DataParallel, ArgumentsThatForwardWritesAreAsInOneProcess) {
  for (const size_t devices : {1, 2, 3}) {
    for (const int64_t rows : {1, 5}) {
      SCOPED_TRACE(c10::str(devices, " devices, ", rows, " rows"));
      InPlace module;
      auto single = twin(module);
      DataParallel<InPlace> model(
          module, {.device_ids = std::vector<at::Device>(devices, at::kCPU)});
      const auto numbers = whole_numbers({rows, 3});
      const auto both = [&](const auto& run) {
        auto x = numbers.clone().requires_grad_();
        auto x_single = numbers.clone().requires_grad_();
        const auto said = message_of([&] { run(model, x); });
        EXPECT_EQ(message_of([&] { run(single, x_single); }).empty(),
                  said.empty());
        if (!said.empty()) return said;
        EXPECT_TRUE(x.grad().equal(x_single.grad()));
        expect_same_gradients(*module, *single);
        return said;
      };
      // A residual use, after the write.
      EXPECT_EQ(both([](auto& net, const at::Tensor& x) {
                  const auto h = x * 2;
                  const auto y = net(h);
                  (y.sum() + h.pow(2).sum()).backward();
                }),
                "");
      EXPECT_THAT(both([](auto& net, const at::Tensor& x) {
                    net(x.sigmoid()).sum().backward();
                  }),
                  HasSubstr("modified by an inplace operation"));
      EXPECT_THAT(both([](auto& net, const at::Tensor& x) { net(x); }),
                  HasSubstr("a leaf Variable that requires grad"));
      auto data = numbers.clone();
      model(data);
      EXPECT_TRUE(data.equal(numbers.relu()));
    }
  }
}

TEST(DataParallel, ALeafMayBeWrittenWithoutRecording) {
  struct ClampImpl : torch::nn::Cloneable<ClampImpl> {
    void reset() override {}
    at::Tensor forward(at::Tensor x) {
      {
        const torch::NoGradGuard no_grad;
        x.clamp_(0, 1);
      }
      return x.square();
    }
  };
  for (const size_t devices : {1, 2}) {
    DataParallel<std::shared_ptr<ClampImpl>> model(
        std::make_shared<ClampImpl>(),
        {.device_ids = std::vector<at::Device>(devices, at::kCPU)});
    auto x = torch::tensor({-1.0, 0.5, 3.0, 1.0}).requires_grad_();
    model(x).sum().backward();
    EXPECT_TRUE(x.equal(torch::tensor({0.0, 0.5, 1.0, 1.0})));
    EXPECT_TRUE(x.grad().equal(2 * x));
  }
}

// Regression: CPU replicas saved the caller's memory for backward.
TEST(DataParallel, WhatTheCallerWritesAfterForwardChangesNoGradient) {
  auto module = whole_linear();
  auto single = twin(module);
  DataParallel<torch::nn::Linear> model(module, kTwo);
  for (const auto& x :
       {whole_numbers({5, 3}), whole_numbers({1, 3}).expand({5, 3})}) {
    const auto kept = x.clone();
    const auto y = model(x).square().sum();
    x.slice(0, 0, 1).fill_(100);
    y.backward();
    single(kept).square().sum().backward();
    expect_same_gradients(*module, *single);
  }
}

TEST(DataParallel, ATensorThatIsGivenTwiceIsOne) {
  struct TwiceImpl : torch::nn::Cloneable<TwiceImpl> {
    void reset() override {}
    at::Tensor forward(const at::Tensor& x, const at::Tensor& same) {
      x.mul_(3);
      return same * 2;
    }
  };
  const auto module = std::make_shared<TwiceImpl>();
  DataParallel<std::shared_ptr<TwiceImpl>> model(module, kTwo);
  const auto x = torch::ones({4, 3}).requires_grad_();
  const auto h = x * 1;
  model(h, h).sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({4, 3}, 6.)));
}

TEST(DataParallel, APieceMayGetAnotherShape) {
  struct UnsqueezeImpl : torch::nn::Cloneable<UnsqueezeImpl> {
    void reset() override {}
    at::Tensor forward(const at::Tensor& x) { return x.unsqueeze_(1); }
  };
  DataParallel<std::shared_ptr<UnsqueezeImpl>> model(
      std::make_shared<UnsqueezeImpl>(), kTwo);
  const auto x = torch::ones({4, 3});
  EXPECT_EQ(model(x).sizes(), at::IntArrayRef({4, 1, 3}));
  EXPECT_EQ(x.sizes(), at::IntArrayRef({4, 3}));
}

// Regression: replicas of one device wrote the same memory at the same time,
// and what others wrote was lost.
TEST(DataParallel, AForwardThatWritesAParameterIsRefusedByName) {
  const torch::nn::EmbeddingOptions options =
      torch::nn::EmbeddingOptions(5, 3).max_norm(0.1);
  const auto index = torch::tensor({0, 1, 2, 3});
  const auto refused = HasSubstr("forward has written parameter 'weight'");
  DataParallel<torch::nn::Embedding> model(torch::nn::Embedding(options), kTwo);
  EXPECT_THAT(message_of([&] { model(index); }), refused);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(message_of([&] { model(index); }), refused);
  }
  DataParallel<torch::nn::Embedding> alone(torch::nn::Embedding(options),
                                           {.device_ids = {at::kCPU}});
  EXPECT_LT(alone(index).norm(2, 1).max().item<double>(), 0.1 + 1e-6);
}

TEST(DataParallel, RowsAlongAnotherDimension) {
  struct ScaleImpl : torch::nn::Cloneable<ScaleImpl> {
    void reset() override {}
    at::Tensor forward(const at::Tensor& x) {
      return x * static_cast<double>(x.size(1));
    }
  };
  DataParallel<std::shared_ptr<ScaleImpl>> model(
      std::make_shared<ScaleImpl>(),
      {.device_ids = {at::kCPU, at::kCPU}, .dim = 1});
  auto out = model(torch::ones({2, 5}));
  EXPECT_TRUE(out.equal(torch::tensor({{3, 3, 3, 2, 2}, {3, 3, 3, 2, 2}})));
}

TEST(DataParallelDevices, OneDeviceMustBeTheModules) {
  torch::nn::Linear module(3, 2);
  DataParallel<torch::nn::Linear> model(module, {.device_ids = {at::kCPU}});
  module->register_parameter("late", torch::ones({2}, at::kMeta));
  try {
    model(torch::ones({2, 3}));
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), HasSubstr("on device cpu (the first of "
                                        "device_ids), but one is on meta"));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing

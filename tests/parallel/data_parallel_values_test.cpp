// The types that DataParallel divides and joins.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/parallel/data_parallel/data_parallel.h"

namespace lockstep::internal::testing {

// A result type of the user's own.
struct Prediction {
  at::Tensor scores;
  std::string label;
};

}  // namespace lockstep::internal::testing

template <>
struct lockstep::DataParallelValue<lockstep::internal::testing::Prediction> {
  using Prediction = lockstep::internal::testing::Prediction;
  static Prediction gather(std::vector<Prediction> parts,
                           const GatherTarget& target) {
    std::vector<at::Tensor> scores;
    for (auto& part : parts) scores.push_back(part.scores);
    return {DataParallelValue<at::Tensor>::gather(scores, target),
            parts.front().label};
  }
};

namespace lockstep::internal::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

const std::vector<at::Device> kThreeDevices(3, at::kCPU);

template <typename T>
std::vector<T> scatter(const T& value, int64_t dim = 0) {
  Scatter over(kThreeDevices, dim);
  return DataParallelValue<T>::scatter(value, over);
}

template <typename T>
T gather(std::vector<T> parts, int64_t dim = 0) {
  return DataParallelValue<T>::gather(std::move(parts), {at::kCPU, dim});
}

std::vector<int64_t> rows(const std::vector<at::Tensor>& parts) {
  std::vector<int64_t> sizes;
  for (const auto& part : parts) sizes.push_back(part.size(0));
  return sizes;
}

TEST(Scatter, DividesAsChunkDoes) {
  EXPECT_THAT(rows(scatter(torch::ones({7, 2}))), ElementsAre(3, 3, 1));
  EXPECT_THAT(rows(scatter(torch::ones({4, 2}))), ElementsAre(2, 2));
  EXPECT_THAT(rows(scatter(torch::ones({3}))), ElementsAre(1, 1, 1));
  EXPECT_THAT(rows(scatter(torch::ones({2}))), ElementsAre(1, 1));
  EXPECT_THAT(rows(scatter(torch::ones({0, 2}))), ElementsAre(0));
  for (int64_t size = 1; size < 20; ++size) {
    auto x = torch::arange(size);
    auto parts = scatter(x);
    auto chunks = x.chunk(3);
    ASSERT_EQ(parts.size(), chunks.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(parts[i].equal(chunks[i]));
    }
  }
}

TEST(Scatter, TakesTheDimensionFromEitherEnd) {
  auto x = torch::arange(12).view({2, 6});
  for (int64_t dim : {1, -1}) {
    auto parts = scatter(x, dim);
    ASSERT_THAT(parts, SizeIs(3));
    EXPECT_TRUE(parts[2].equal(x.slice(1, 4, 6)));
    EXPECT_TRUE(gather(parts, dim).equal(x));
  }
}

TEST(Scatter, PiecesAreOfTheGraphTwice) {
  auto x = torch::randn({6}, torch::kFloat64).requires_grad_();
  auto f = [&] {
    at::Tensor sum = torch::zeros({}, torch::kFloat64);
    for (auto& part : scatter(x)) sum = sum + part.pow(3).sum();
    return sum;
  };
  auto first = torch::autograd::grad({f()}, {x}, {}, true, true)[0];
  EXPECT_TRUE(first.allclose(3 * x * x));
  auto second = torch::autograd::grad({first.sum()}, {x})[0];
  EXPECT_TRUE(second.allclose(6 * x));
}

TEST(Scatter, PieceThatIsWrittenToSpoilsNoOther) {
  auto parts = scatter(torch::ones({6}, at::requires_grad()) * 2);
  auto saved = parts[0] * parts[0];
  parts[1].mul_(3);
  EXPECT_NO_THROW(saved.sum().backward());
}

TEST(Scatter, GoesIntoContainers) {
  auto x = torch::arange(6);
  using Inner = std::map<std::string, at::Tensor>;
  using All =
      std::tuple<at::Tensor, std::vector<at::Tensor>, Inner,
                 std::pair<at::Tensor, int>, std::string, std::vector<bool>,
                 std::optional<int>, std::array<int, 2>>;
  All all{x, {x, x + 1}, {{"a", x}}, {x, 7}, "text", {true}, 3, {4, 5}};
  auto parts = scatter(all);
  ASSERT_THAT(parts, SizeIs(3));
  auto last = torch::arange(4, 6);
  EXPECT_TRUE(std::get<0>(parts[2]).equal(last));
  EXPECT_TRUE(std::get<1>(parts[2])[1].equal(last + 1));
  EXPECT_TRUE(std::get<2>(parts[2]).at("a").equal(last));
  EXPECT_TRUE(std::get<3>(parts[2]).first.equal(last));
  EXPECT_EQ(std::get<3>(parts[2]).second, 7);
  EXPECT_EQ(std::get<4>(parts[2]), "text");
  EXPECT_EQ(std::get<5>(parts[2]), std::vector<bool>{true});
  EXPECT_EQ(std::get<6>(parts[2]), 3);
  EXPECT_THAT(std::get<7>(parts[2]), ElementsAre(4, 5));
}

TEST(Scatter, SmallBatchLimitsWhatIsCopiedToAll) {
  auto parts = scatter(std::tuple(torch::ones({2}), 5));
  ASSERT_THAT(parts, SizeIs(2));
  EXPECT_EQ(std::get<1>(parts[1]), 5);
}

TEST(Scatter, TensorsOfDifferentNumbersOfPartsAreRefused) {
  try {
    scatter(std::tuple(torch::ones({6, 2}), torch::ones({1, 2})));
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("[1, 2] makes 1 parts and a tensor of shape "
                          "[6, 2] 3"));
  }
  EXPECT_THROW(scatter(torch::ones({})), std::invalid_argument);
}

TEST(Gather, JoinsContainers) {
  using Result =
      std::tuple<std::map<std::string, at::Tensor>, std::vector<at::Tensor>>;
  auto part = [](float value) {
    auto x = torch::full({1}, value);
    return Result{{{"a", x}}, {x, -x}};
  };
  auto all = gather<Result>({part(1), part(2)});
  auto expected = torch::tensor({1.f, 2.f});
  EXPECT_TRUE(std::get<0>(all).at("a").equal(expected));
  EXPECT_TRUE(std::get<1>(all)[1].equal(-expected));
}

TEST(Gather, ScalarsBecomeAVector) {
  auto all = gather<at::Tensor>({torch::tensor(1.), torch::tensor(2.)});
  EXPECT_TRUE(all.equal(torch::tensor({1., 2.})));
  EXPECT_TRUE(
      gather<at::Tensor>({torch::tensor(1.)}).equal(torch::tensor({1.})));
}

TEST(Gather, ResultsWithDifferentMembersAreRefused) {
  auto x = torch::ones({1});
  using Map = std::map<std::string, at::Tensor>;
  EXPECT_THROW(gather<Map>({{{"a", x}}, {{"b", x}}}), std::invalid_argument);
  EXPECT_THROW(gather<Map>({{{"a", x}}, {}}), std::invalid_argument);
  using List = std::vector<at::Tensor>;
  EXPECT_THROW(gather<List>({{x}, {x, x}}), std::invalid_argument);
  EXPECT_THROW(gather<at::Tensor>({x, {}}), std::invalid_argument);
}

struct ManyImpl : torch::nn::Cloneable<ManyImpl> {
  ManyImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", torch::nn::Linear(2, 2));
  }
  std::map<std::string, std::tuple<at::Tensor, at::Tensor>> forward(
      const at::Tensor& x, const std::vector<at::Tensor>& more, double scale) {
    auto y = linear(x) * scale;
    for (const auto& each : more) y = y + each;
    return {{"y", {y, y.mean()}}};
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Many);

TEST(DataParallelValues, GoThroughForwardAndBackward) {
  Many module;
  DataParallel<Many> model(module, {.device_ids = kThreeDevices});
  auto x = torch::randn({6, 2});
  std::vector<at::Tensor> more{torch::ones({6, 2}), torch::ones({6, 1})};
  auto [y, mean] = model(x, more, 2.0)["y"];
  auto [expected, _] = module->forward(x, more, 2.0)["y"];
  EXPECT_TRUE(y.allclose(expected, 1e-6, 1e-6));
  ASSERT_THAT(mean.sizes(), ElementsAre(3));
  EXPECT_TRUE(mean.mean().allclose(expected.mean(), 1e-6, 1e-6));
  mean.mean().backward();
  auto parallel = module->linear->weight.grad().clone();
  module->zero_grad();
  expected.mean().backward();
  EXPECT_TRUE(parallel.allclose(module->linear->weight.grad(), 1e-6, 1e-6));
}

TEST(DataParallelValues, ForwardWithoutArgumentsRunsOnce) {
  struct NothingImpl : torch::nn::Cloneable<NothingImpl> {
    void reset() override {}
    at::Tensor forward() { return torch::ones({2}); }
  };
  DataParallel<std::shared_ptr<NothingImpl>> model(
      std::make_shared<NothingImpl>(), {.device_ids = kThreeDevices});
  EXPECT_TRUE(model().equal(torch::ones({2})));
}

TEST(DataParallelValues, OfTheUsersOwnType) {
  struct PredictImpl : torch::nn::Cloneable<PredictImpl> {
    void reset() override {}
    Prediction forward(const at::Tensor& x) { return {x * 2, "twice"}; }
  };
  DataParallel<std::shared_ptr<PredictImpl>> model(
      std::make_shared<PredictImpl>(), {.device_ids = kThreeDevices});
  auto all = model(torch::arange(5));
  EXPECT_TRUE(all.scores.equal(torch::arange(5) * 2));
  EXPECT_EQ(all.label, "twice");
}

TEST(DataParallelValues, LibTorchsOtherResults) {
  torch::nn::AdaptiveLogSoftmaxWithLoss softmax(
      torch::nn::AdaptiveLogSoftmaxWithLossOptions(8, 6, {2}));
  DataParallel<torch::nn::AdaptiveLogSoftmaxWithLoss> classifier(
      softmax, {.device_ids = kThreeDevices});
  const auto x = torch::randn({5, 8});
  const auto target = torch::tensor({0, 1, 2, 5, 4});
  const auto joined = classifier(x, target);
  const auto expected = softmax(x, target);
  EXPECT_TRUE(joined.output.allclose(expected.output, 1e-5, 1e-6));
  EXPECT_NEAR(joined.loss, expected.loss, 1e-6);

  using State = std::tuple<at::Tensor, at::Tensor>;
  using Result = std::tuple<at::Tensor, State>;
  torch::nn::Sequential net(
      torch::nn::Linear(3, 2),
      torch::nn::LSTM(torch::nn::LSTMOptions(2, 2).batch_first(true)));
  DataParallel<torch::nn::Sequential> recurrent(net,
                                                {.device_ids = kThreeDevices});
  const auto sequences = torch::randn({4, 5, 3});
  const auto output = std::get<0>(recurrent.forward<Result>(sequences));
  EXPECT_TRUE(output.allclose(std::get<0>(net->forward<Result>(sequences)),
                              1e-5, 1e-6));
}

TEST(DataParallelValues, RecurrentModulesRun) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(3, 4).batch_first(true));
  DataParallel<torch::nn::LSTM> model(lstm, {.device_ids = kThreeDevices});
  auto x = torch::randn({6, 5, 3});
  auto out = std::get<0>(model(x));
  auto expected = std::get<0>(lstm(x));
  EXPECT_TRUE(out.allclose(expected, 1e-5, 1e-6));
  out.square().sum().backward();
  auto parallel = lstm->parameters()[0].grad().clone();
  lstm->zero_grad();
  expected.square().sum().backward();
  EXPECT_TRUE(parallel.allclose(lstm->parameters()[0].grad(), 1e-4, 1e-5));
}

}  // namespace
}  // namespace lockstep::internal::testing

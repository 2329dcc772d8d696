#include "lockstep/data/collate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <complex>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/samplers.h"

// Types of a program, outside Lockstep's namespaces.
namespace collate_test_user {

struct Sample {
  at::Tensor image;
  int label;
  std::string name;
};
struct Batch {
  at::Tensor images;
  at::Tensor labels;
  std::vector<std::string> names;
};
Batch collate(std::vector<Sample> samples) {
  return {lockstep::collate_member(samples, &Sample::image),
          lockstep::collate_member(samples, &Sample::label),
          lockstep::collate_member(samples, &Sample::name)};
}

// Nothing says how these are collated.
struct Plain {
  int value;
};

}  // namespace collate_test_user

namespace lockstep::internal {
namespace {

using collate_test_user::Plain;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using User = collate_test_user::Sample;

void expect_tensor(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(torch::equal(actual, expected)) << actual;
}

TEST(Collate, NumbersBecomeATensor) {
  expect_tensor(default_collate(std::vector<int>{3, -1}),
                torch::tensor({3, -1}, torch::kLong));
  expect_tensor(default_collate(std::vector<uint8_t>{3, 200}),
                torch::tensor({3, 200}, torch::kLong));
  expect_tensor(default_collate(std::vector<int64_t>{int64_t{1} << 40}),
                torch::tensor({int64_t{1} << 40}));
  expect_tensor(default_collate(std::vector<bool>{true, false}),
                torch::tensor({1, 0}).to(torch::kBool));
  expect_tensor(default_collate(std::vector<float>{0.5f, 2}),
                torch::tensor({0.5f, 2.0f}));
  expect_tensor(default_collate(std::vector<double>{0.5, 2}),
                torch::tensor({0.5, 2.0}, torch::kDouble));
  expect_tensor(default_collate(std::vector<c10::Half>{0.5f}),
                torch::tensor({0.5f}).to(torch::kHalf));
  expect_tensor(default_collate(std::vector<c10::complex<float>>{{1, 2}}),
                torch::complex(torch::tensor({1.0f}), torch::tensor({2.0f})));
  // Those of the standard library stayed a vector.
  expect_tensor(default_collate(std::vector<std::complex<float>>{{1, 2}}),
                torch::complex(torch::tensor({1.0f}), torch::tensor({2.0f})));
  expect_tensor(default_collate(std::vector<std::complex<double>>{{1, 2}}),
                torch::complex(torch::tensor({1.0}, torch::kDouble),
                               torch::tensor({2.0}, torch::kDouble)));
}

TEST(Collate, TensorsAreStacked) {
  expect_tensor(
      default_collate(std::vector{torch::arange(3), torch::arange(3) + 3}),
      torch::arange(6).view({2, 3}));
  EXPECT_THROW(default_collate(std::vector{torch::arange(3), torch::arange(2)}),
               c10::Error);
}

TEST(Collate, MembersOfPairsAndTuplesAreCollated) {
  using Nested = std::tuple<int, std::pair<at::Tensor, float>, std::string>;
  std::vector<Nested> samples{{1, {torch::zeros({2}), 0.5f}, "a"},
                              {2, {torch::ones({2}), 1.5f}, "b"}};
  auto [numbers, pair, names] = default_collate(std::move(samples));
  expect_tensor(numbers, torch::tensor({1, 2}, torch::kLong));
  expect_tensor(pair.first,
                torch::tensor({0.0f, 0.0f, 1.0f, 1.0f}).view({2, 2}));
  expect_tensor(pair.second, torch::tensor({0.5f, 1.5f}));
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b"}));
}

TEST(Collate, ExamplesOfAnyTypesAreCollated) {
  using Example = torch::data::Example<std::pair<at::Tensor, float>, int>;
  auto batch = default_collate(std::vector<Example>{
      {{torch::zeros({2}), 1.0f}, 7}, {{torch::ones({2}), 2.0f}, 8}});
  EXPECT_EQ(batch.data.first.sizes(), (c10::IntArrayRef{2, 2}));
  expect_tensor(batch.data.second, torch::tensor({1.0f, 2.0f}));
  expect_tensor(batch.target, torch::tensor({7, 8}, torch::kLong));
  static_assert(std::is_same_v<decltype(default_collate(
                                   std::vector<torch::data::TensorExample>())),
                               torch::data::TensorExample>);
}

TEST(Collate, MapsAreCollatedByKey) {
  using Map = std::map<std::string, at::Tensor>;
  auto batch = default_collate(
      std::vector<Map>{{{"x", torch::zeros({2})}, {"y", torch::zeros({1})}},
                       {{"x", torch::ones({2})}, {"y", torch::ones({1})}}});
  expect_tensor(batch.at("x"),
                torch::tensor({0.0f, 0.0f, 1.0f, 1.0f}).view({2, 2}));
  expect_tensor(batch.at("y"), torch::tensor({0.0f, 1.0f}).view({2, 1}));

  const Map one{{"x", torch::zeros({2})}};
  for (const Map& other :
       {Map{}, Map{{"y", torch::zeros({2})}},
        Map{{"x", torch::zeros({2})}, {"y", torch::zeros({2})}}}) {
    EXPECT_THAT([&] { default_collate(std::vector<Map>{one, one, other}); },
                ThrowsMessage<std::invalid_argument>(
                    HasSubstr("samples 0 and 2 of the batch have different")));
  }
}

// As in Python: element i of the batch has element i of each sample.
TEST(Collate, SequencesAreTransposed) {
  auto vectors =
      default_collate(std::vector<std::vector<int>>{{1, 2, 3}, {4, 5, 6}});
  ASSERT_EQ(vectors.size(), 3u);
  expect_tensor(vectors[2], torch::tensor({3, 6}, torch::kLong));
  auto flags = default_collate(
      std::vector<std::vector<bool>>{{true, false}, {false, false}});
  expect_tensor(flags[0], torch::tensor({1, 0}).to(torch::kBool));
  auto arrays =
      default_collate(std::vector<std::array<float, 2>>{{1, 2}, {3, 4}});
  static_assert(std::is_same_v<decltype(arrays), std::array<at::Tensor, 2>>);
  expect_tensor(arrays[1], torch::tensor({2.0f, 4.0f}));
  EXPECT_THAT(
      [] { default_collate(std::vector<std::vector<int>>{{1}, {2}, {}}); },
      ThrowsMessage<std::invalid_argument>(
          HasSubstr("sample 0 of the batch has 1 elements, that of sample 2 "
                    "has 0")));
}

TEST(Collate, AFunctionOfTheUsersIsFoundWhereverTheTypeIs) {
  const auto samples = [] {
    return std::vector<User>{{torch::zeros({2}), 1, "a"},
                             {torch::ones({2}), 2, "b"}};
  };
  collate_test_user::Batch batch = default_collate(samples());
  expect_tensor(batch.labels, torch::tensor({1, 2}, torch::kLong));
  EXPECT_EQ(batch.images.sizes(), (c10::IntArrayRef{2, 2}));
  EXPECT_EQ(batch.names, (std::vector<std::string>{"a", "b"}));

  std::vector<std::map<int, User>> maps;
  for (User& sample : samples()) maps.push_back({{5, sample}});
  EXPECT_EQ(default_collate(maps).at(5).names.size(), 2u);
}

TEST(Collate, OtherTypesStayAVectorOfSamples) {
  EXPECT_EQ(default_collate(std::vector<std::string>{"a", "b"}),
            (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(default_collate(std::vector<Plain>{{1}, {2}})[1].value, 2);
}

TEST(Collate, TheLoaderUsesItForSamples) {
  struct Users {
    User get(size_t index) const {
      return {torch::full({2}, static_cast<int64_t>(index)),
              static_cast<int>(index), std::to_string(index)};
    }
    size_t size() const { return 5; }
  } dataset;
  SequentialSampler sampler(5);
  DataLoader loader(dataset, sampler, {.batch_size = 3, .num_workers = 2});
  static_assert(
      std::is_same_v<decltype(loader)::Batch, collate_test_user::Batch>);
  std::vector<std::string> names;
  for (auto& batch : loader) {
    names.insert(names.end(), batch.names.begin(), batch.names.end());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"0", "1", "2", "3", "4"}));
}

}  // namespace
}  // namespace lockstep::internal

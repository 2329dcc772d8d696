// The datasets that give samples of other datasets: Subset, TakeDataset,
// ShuffledDataset, RepeatedDataset, ConcatDataset, AnyDataset, random_split.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/datasets/any_dataset.h"
#include "lockstep/data/datasets/map_dataset.h"
#include "lockstep/data/datasets/selected_samples.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Sample i is the number i, plus `first`. Without a base class.
struct Counted {
  size_t length = 0;
  int64_t first = 0;
  int64_t get(size_t index) const {
    return first + static_cast<int64_t>(index);
  }
  size_t size() const { return length; }
};

// A user's dataset with the base of this library; the target is the square.
struct SquaresDataset : Dataset<> {
  torch::data::Example<> get(size_t index) const override {
    const auto value = torch::tensor(static_cast<int64_t>(index));
    return {value, value * value};
  }
  size_t size() const override { return 6; }
};

// The same as a dataset of LibTorch, whose functions are not const.
struct LibTorchSquares : torch::data::datasets::Dataset<LibTorchSquares> {
  torch::data::Example<> get(size_t index) override {
    return SquaresDataset().get(index);
  }
  std::optional<size_t> size() const override { return 6; }
};

// Can be neither copied nor moved.
struct Pinned : SquaresDataset {
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
};

TensorDataset six_rows() {
  return {torch::arange(6), torch::arange(6).square()};
}

template <class D>
std::vector<int64_t> counted(const D& dataset) {
  std::vector<int64_t> all;
  std::vector<size_t> indices;
  for (size_t i = 0; i < dataset.size(); ++i) {
    all.push_back(dataset.get(i));
    indices.push_back(i);
  }
  EXPECT_EQ(HeldDataset<D>(dataset).get_batch(indices), all);
  return all;
}

template <class D>
void refuses_index(const D& dataset, size_t index, const char* message) {
  EXPECT_THAT([&] { dataset.get(index); },
              ThrowsMessage<c10::IndexError>(HasSubstr(message)));
  const HeldDataset<D> held(dataset);
  EXPECT_THAT([&] { held.get_batch(c10::ArrayRef<size_t>(index)); },
              ThrowsMessage<c10::IndexError>(HasSubstr(message)));
}

TEST(Subset, GivesTheListedSamples) {
  const Subset subset(Counted{10}, {7, 0, 7});
  EXPECT_THAT(counted(subset), ElementsAre(7, 0, 7));
  EXPECT_THAT(subset.indices(), ElementsAre(7, 0, 7));
  refuses_index(subset, 3, "Subset: index 3 is outside of a dataset of 3");
  EXPECT_THAT([] { Subset(Counted{10}, {3, 10}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "index 10 (at place 1 of the list) is outside of a dataset "
                  "of 10 samples")));
}

TEST(TakeDataset, GivesARangeOfSamples) {
  EXPECT_THAT(counted(TakeDataset(Counted{10}, 3)), ElementsAre(0, 1, 2));
  const TakeDataset middle(Counted{10}, 2, 8);
  EXPECT_THAT(counted(middle), ElementsAre(8, 9));
  refuses_index(middle, 2, "TakeDataset: index 2");
  EXPECT_TRUE(counted(TakeDataset(Counted{10}, 0, 10)).empty());
  EXPECT_THAT([] { TakeDataset(Counted{10}, 3, 8); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "3 samples from number 8 on were asked for; the dataset has "
                  "10")));
  EXPECT_THROW(TakeDataset(Counted{10}, SIZE_MAX, 2), std::invalid_argument);
  EXPECT_THROW(TakeDataset(Counted{10}, 0, 11), std::invalid_argument);
}

TEST(ShuffledDataset, HasTheOrderOfRandperm) {
  // torch.randperm(8, generator=torch.Generator().manual_seed(3))
  const auto order =
      torch::randperm(8, at::make_generator<at::CPUGeneratorImpl>(uint64_t{3}));
  const ShuffledDataset shuffled(Counted{8}, 3);
  EXPECT_TRUE(torch::equal(torch::tensor(counted(shuffled)), order));
  EXPECT_NE(counted(ShuffledDataset(Counted{8}, 4)), counted(shuffled));
  refuses_index(shuffled, 8, "ShuffledDataset: index 8");
}

TEST(RepeatedDataset, BeginsAgainAtItsEnd) {
  const RepeatedDataset twice(Counted{3}, 2);
  EXPECT_THAT(counted(twice), ElementsAre(0, 1, 2, 0, 1, 2));
  refuses_index(twice, 6, "RepeatedDataset: index 6");
  EXPECT_EQ(RepeatedDataset(Counted{3}, 0).size(), 0u);
  EXPECT_EQ(RepeatedDataset(Counted{0}, SIZE_MAX).size(), 0u);
  EXPECT_THAT([] { RepeatedDataset(Counted{3}, SIZE_MAX / 3); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("3 samples cannot be repeated")));
}

TEST(ConcatDataset, GivesOneDatasetAfterAnother) {
  const ConcatDataset all(Counted{2}, Counted{0}, Counted{3, 10});
  static_assert(std::is_same_v<decltype(all), const ConcatDataset<Counted>>);
  EXPECT_THAT(counted(all), ElementsAre(0, 1, 10, 11, 12));
  refuses_index(all, 5, "ConcatDataset: index 5 is outside of a dataset of 5");

  const ConcatDataset mixed(Counted{2}, TakeDataset(Counted{9, 100}, 1, 4));
  static_assert(std::is_same_v<decltype(mixed),
                               const ConcatDataset<AnyDataset<int64_t>>>);
  EXPECT_THAT(counted(mixed), ElementsAre(0, 1, 104));

  const ConcatDataset listed(std::vector<Counted>{{1}, {1, 7}});
  EXPECT_THAT(counted(listed), ElementsAre(0, 7));
  EXPECT_THAT([] { ConcatDataset none(std::vector<Counted>{}); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("there is no dataset; give one or more")));
}

TEST(AnyDataset, HoldsADatasetOfAnyType) {
  AnyDataset<int64_t> any(Counted{3});
  EXPECT_THAT(counted(any), ElementsAre(0, 1, 2));
  any = AnyDataset<int64_t>(Subset(any, {2}));
  EXPECT_THAT(counted(any), ElementsAre(2));
  const AnyDataset<> examples(six_rows());
  EXPECT_EQ(examples.get(3).target.item<int64_t>(), 9);
}

TEST(RandomSplit, GivesEachSampleToOnePart) {
  for (const auto& parts : {random_split(Counted{10}, {7, 3}, 42),
                            random_split(Counted{10}, {0.7, 0.3}, 42)}) {
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(parts[0].size(), 7u);
    auto all = counted(parts[0]);
    const auto rest = counted(parts[1]);
    all.insert(all.end(), rest.begin(), rest.end());
    EXPECT_EQ(all, counted(ShuffledDataset(Counted{10}, 42)));
  }
  const std::vector<int64_t> lengths{4, 6};
  EXPECT_EQ(random_split(Counted{10}, lengths, 0)[1].size(), 6u);
  EXPECT_TRUE(random_split(Counted{0}, std::vector<int>{}, 0).empty());
}

TEST(RandomSplit, GivesWhatIsLeftToTheFirstParts) {
  const auto sizes = [](size_t size, std::initializer_list<double> fractions) {
    std::vector<size_t> result;
    for (const auto& part : random_split(Counted{size}, fractions, 0)) {
      result.push_back(part.size());
    }
    return result;
  };
  EXPECT_THAT(sizes(11, {0.5, 0.25, 0.25}), ElementsAre(6, 3, 2));
  EXPECT_THAT(sizes(2, {0.3, 0.3, 0.4}), ElementsAre(1, 1, 0));
}

TEST(RandomSplit, RefusesLengthsThatDoNotFit) {
  const auto refuses = [](std::vector<double> lengths, const char* message) {
    EXPECT_THAT([&] { random_split(Counted{10}, lengths, 0); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(message)));
  };
  refuses({7, 4},
          "the lengths are 7.000000 + 4.000000; give numbers of "
          "samples that add up to 10");
  refuses({0.5, 0.4}, "or fractions that add up to 1");
  refuses({2.5, 7.5}, "give numbers of samples");
  refuses({11, -1}, "a length is -1.000000; it must be 0 or more");
  refuses({NAN, 1}, "a length is nan");
  refuses({INFINITY}, "the lengths are inf");
  refuses({}, "the lengths are none");
}

TEST(SelectedSamples, TakeEveryKindOfDataset) {
  const auto target = [](const auto& dataset) {
    const TakeDataset taken(dataset, 2, 4);
    EXPECT_EQ(taken.get(1).target.template item<int64_t>(), 25);
    const BatchMapDataset stacked(
        taken, [](torch::data::Example<> batch) { return batch; });
    return stacked.get_batch(std::vector<size_t>{0, 1}).target;
  };
  const auto expected = torch::tensor({16, 25}, torch::kLong);
  EXPECT_TRUE(torch::equal(target(SquaresDataset()), expected));
  EXPECT_TRUE(torch::equal(target(LibTorchSquares()), expected));
  EXPECT_TRUE(torch::equal(target(six_rows()), expected));
  EXPECT_TRUE(torch::equal(target(std::make_shared<Pinned>()), expected));
  EXPECT_TRUE(torch::equal(target(std::make_shared<const Pinned>()), expected));
  const auto shared = std::make_shared<LibTorchSquares>();
  EXPECT_TRUE(torch::equal(target(shared), expected));

  EXPECT_THAT([] { TakeDataset(std::shared_ptr<Pinned>(), 0); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("is null")));
  struct Unsized : LibTorchSquares {
    std::optional<size_t> size() const override { return std::nullopt; }
  };
  EXPECT_THAT([] { TakeDataset(Unsized(), 0); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("does not know its size")));
}

// A TensorDataset makes a batch by one gather; datasets on top of it must not
// turn that into single samples.
TEST(SelectedSamples, FetchBatchesAsTheDatasetBelowDoes) {
  struct Batches {
    int64_t get_batch(c10::ArrayRef<size_t> indices) const {
      int64_t sum = 0;
      for (const size_t index : indices) sum = 100 * sum + int64_t(index);
      return sum;
    }
    size_t size() const { return 10; }
  };
  const Subset nested(RepeatedDataset(TakeDataset(Batches(), 4, 3), 2),
                      {5, 0, 7});
  EXPECT_EQ(nested.get_batch(std::vector<size_t>{0, 2, 1}), 40603);

  const Subset rows(six_rows(), {4, 5});
  const auto batch = rows.get_batch(std::vector<size_t>{1, 0});
  static_assert(std::is_same_v<decltype(batch), const torch::data::Example<>>,
                "a whole batch, and not a list of samples");
  EXPECT_TRUE(torch::equal(batch.data, torch::tensor({5, 4}, torch::kLong)));
}

TEST(SelectedSamples, ADatasetOfOnesOwnGoesIntoTheLoader) {
  SquaresDataset squares;
  DistributedSampler sampler(6, {.shuffle = false});
  DataLoader loader(squares, sampler, {.batch_size = 6});
  EXPECT_TRUE(torch::equal(loader.begin()->target, torch::arange(6).square()));
}

TEST(SelectedSamples, WorkersDoNotChangeTheBatches) {
  ConcatDataset all(ShuffledDataset(six_rows(), 1),
                    RepeatedDataset(TakeDataset(SquaresDataset(), 3), 2),
                    Subset(LibTorchSquares(), {5, 0, 5}),
                    std::make_shared<Pinned>());
  ASSERT_EQ(all.size(), 21u);
  std::vector<at::Tensor> expected;
  for (const int64_t workers : {0, 1, 3}) {
    DistributedSampler sampler(21);
    DataLoader loader(all, sampler, {.batch_size = 4, .num_workers = workers});
    std::vector<at::Tensor> targets;
    for (auto& batch : loader) {
      EXPECT_TRUE(torch::equal(batch.data.square(), batch.target));
      targets.push_back(batch.target);
    }
    const auto sequence = torch::cat(targets);
    if (expected.empty()) expected.push_back(sequence);
    EXPECT_TRUE(torch::equal(sequence, expected[0])) << workers << " workers";
  }
}

TEST(TensorDataset, GivesSingleSamplesAsCopies) {
  const auto rows = torch::arange(6).view({3, 2});
  const TensorDataset dataset(rows, torch::arange(3));
  auto sample = dataset.get(1);
  EXPECT_TRUE(torch::equal(sample.data, torch::tensor({2, 3}, torch::kLong)));
  EXPECT_EQ(sample.target.dim(), 0);
  sample.data.zero_();
  EXPECT_EQ(rows.sum().item<int64_t>(), 15);
  refuses_index(dataset, 3, "3 samples");
}

}  // namespace
}  // namespace lockstep::internal

// The samplers of one process, and what all samplers have in common.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/samplers.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Indices = std::vector<size_t>;
using Weights = std::vector<double>;

Indices counted(size_t size) {
  Indices indices(size);
  std::iota(indices.begin(), indices.end(), size_t{0});
  return indices;
}

Indices sorted(Indices indices) {
  std::ranges::sort(indices);
  return indices;
}

template <class Exception = std::invalid_argument, class F>
void expect_refused(F make, const char* message) {
  EXPECT_THAT([&] { make(); }, ThrowsMessage<Exception>(HasSubstr(message)));
}

TEST(Samplers, SequentialKeepsTheOrder) {
  SequentialSampler sampler(5);
  EXPECT_EQ(sampler.size(), 5);
  EXPECT_EQ(sampler.begin_pass(), counted(5));
  EXPECT_EQ(sampler.begin_pass(), counted(5));
  EXPECT_TRUE(SequentialSampler(0).begin_pass().empty());
  expect_refused([] { SequentialSampler(-1); },
                 "SequentialSampler: dataset size is -1");
}

// The expected values were printed by torch 2.13.0's torch.utils.data with
// torch.Generator().manual_seed(seed + epoch); the interop test compares many.
TEST(Samplers, DrawPythonsIndices) {
  RandomSampler random(10, {.seed = 7});
  random.set_epoch(5);
  EXPECT_EQ(random.indices(), (Indices{3, 5, 8, 1, 0, 6, 9, 2, 7, 4}));
  RandomSampler replacing(10, {.replacement = true, .num_samples = 6});
  EXPECT_EQ(replacing.indices(), (Indices{4, 9, 3, 0, 3, 9}));
  SubsetRandomSampler subset({20, 21, 22, 23, 24}, {.seed = 3});
  EXPECT_EQ(subset.indices(), (Indices{21, 20, 23, 24, 22}));
  WeightedRandomSampler weighted(Weights{0.1, 0.9, 0.4, 0.7, 3.0, 0.6}, 5);
  EXPECT_EQ(weighted.indices(), (Indices{5, 4, 4, 5, 4}));
  WeightedRandomSampler once(Weights{0.9, 0.4, 0.05, 0.2, 0.3, 0.1}, 5,
                             {.replacement = false});
  EXPECT_EQ(once.indices(), (Indices{1, 4, 0, 2, 3}));
}

TEST(Samplers, RandomVisitsEachSampleOnce) {
  RandomSampler sampler(100);
  EXPECT_EQ(sampler.size(), 100);
  EXPECT_EQ(sorted(sampler.begin_pass()), counted(100));

  // More samples than there are: whole orders, and a part of one.
  RandomSampler longer(10, {.num_samples = 25});
  const Indices indices = longer.begin_pass();
  ASSERT_EQ(indices.size(), 25u);
  EXPECT_EQ(sorted({indices.begin(), indices.begin() + 10}), counted(10));
  EXPECT_EQ(sorted({indices.begin() + 10, indices.begin() + 20}), counted(10));
  EXPECT_EQ(longer.dataset_size(), 10);
  EXPECT_EQ(RandomSampler(10, {.num_samples = 3}).begin_pass().size(), 3u);
}

TEST(Samplers, RandomRefusesWhatCannotBeDrawn) {
  expect_refused([] { RandomSampler(0); }, "the dataset is empty");
  expect_refused([] { RandomSampler(-1); }, "dataset size is -1");
  for (int64_t number : {0, -3}) {
    expect_refused([=] { RandomSampler(4, {.num_samples = number}); },
                   "it must be 1 or more");
  }
}

TEST(Samplers, SubsetVisitsItsIndices) {
  SubsetRandomSampler sampler({9, 2, 5});
  EXPECT_EQ(sampler.size(), 3);
  EXPECT_EQ(sampler.dataset_size(), 10) << "the highest index + 1";
  EXPECT_EQ(sorted(sampler.begin_pass()), (Indices{2, 5, 9}));
  SubsetRandomSampler none({});
  EXPECT_TRUE(none.begin_pass().empty());
  EXPECT_EQ(none.dataset_size(), 0);
}

TEST(Samplers, WeightedDrawsByProbability) {
  WeightedRandomSampler sampler(Weights{0, 1, 0, 3}, 4000);
  EXPECT_EQ(sampler.size(), 4000);
  EXPECT_EQ(sampler.dataset_size(), 4);
  const Indices drawn = sampler.begin_pass();
  const auto times = [&](size_t index) {
    return std::ranges::count(drawn, index);
  };
  EXPECT_EQ(times(0) + times(2), 0);
  EXPECT_NEAR(static_cast<double>(times(3)), 3000, 150);  // 5 deviations of 27
  WeightedRandomSampler once(torch::tensor({2, 0, 1}), 2,
                             {.replacement = false});
  EXPECT_EQ(sorted(once.begin_pass()), (Indices{0, 2}));
}

TEST(Samplers, WeightedRefusesWhatCannotBeDrawn) {
  const auto make = [](const Weights& weights, int64_t number, bool replaces) {
    return [=] {
      WeightedRandomSampler(weights, number, {.replacement = replaces});
    };
  };
  expect_refused(make({1, -0.5}, 1, true), "weight 1 is -0.5");
  expect_refused(make({1, NAN}, 1, true), "weight 1 is nan");
  expect_refused(make({INFINITY}, 1, true), "weight 0 is inf");
  expect_refused(make({0, 0}, 1, true), "none of the 2 weights is above 0");
  expect_refused(make({}, 1, true), "none of the 0 weights is above 0");
  expect_refused(make({1, 1}, 0, true), "num_samples is 0");
  expect_refused(make({1, 0, 1}, 3, false),
                 "num_samples is 3, but only 2 weights are above 0");
  expect_refused([] { WeightedRandomSampler(torch::ones({2, 2}), 1); },
                 "the weights have 2 dimensions");
  expect_refused([] { WeightedRandomSampler(at::Tensor(), 1); },
                 "the weights are undefined");
  expect_refused([] { WeightedRandomSampler(torch::ones({(1 << 24) + 1}), 1); },
                 "there are 16777217 weights");
  expect_refused([] { DistributedWeightedSampler(Weights{-1}, 1); },
                 "DistributedWeightedSampler: weight 0 is -1");
  expect_refused(
      [] {
        DistributedWeightedSampler(Weights{1}, 1,
                                   {.num_replicas = 2, .rank = 2});
      },
      "DistributedWeightedSampler: rank is 2");
}

// The weights are copied: changing the tensor afterwards changes nothing.
TEST(Samplers, WeightedKeepsItsWeights) {
  at::Tensor weights = torch::ones({8}, torch::kDouble);
  WeightedRandomSampler sampler(weights, 20);
  const Indices before = sampler.indices();
  weights.slice(0, 1).zero_();
  EXPECT_EQ(sampler.indices(), before);
}

TEST(Samplers, DistributedWeightedSharesOneDraw) {
  const Weights weights{1, 2, 3, 4, 5, 6, 7};
  WeightedRandomSampler alone(weights, 25, {.seed = 4});
  alone.set_epoch(2);
  const Indices all = alone.indices();
  for (int64_t ranks : {1, 2, 3, 30}) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      DistributedWeightedSampler padded(
          weights, 25, {.num_replicas = ranks, .rank = rank, .seed = 4});
      DistributedWeightedSampler once(
          weights, 25,
          {.num_replicas = ranks, .rank = rank, .seed = 4, .pad = false});
      DistributedWeightedSampler dropping(
          weights, 25,
          {.num_replicas = ranks, .rank = rank, .seed = 4, .drop_last = true});
      for (auto* sampler : {&padded, &once, &dropping}) sampler->set_epoch(2);
      Indices mine;
      for (int64_t place = rank; place < (24 / ranks + 1) * ranks;
           place += ranks) {
        mine.push_back(all[place % 25]);
      }
      EXPECT_EQ(padded.begin_pass(), mine);
      EXPECT_EQ(padded.size(), 24 / ranks + 1);
      EXPECT_EQ(dropping.size(), 25 / ranks);
      mine.resize(once.size());
      EXPECT_EQ(once.begin_pass(), mine);
      mine.resize(dropping.size());
      EXPECT_EQ(dropping.begin_pass(), mine);
    }
  }
}

TEST(Samplers, BatchSamplerCutsBatches) {
  SequentialSampler sampler(10);
  BatchSampler all(sampler, 4), whole(sampler, 4, /*drop_last=*/true);
  EXPECT_EQ(all.size(), 3);
  EXPECT_EQ(whole.size(), 2);
  EXPECT_EQ(all.dataset_size(), 10);
  BatchList list = all.begin_pass();
  EXPECT_EQ(list.indices, counted(10));
  EXPECT_EQ(list.ends, (Indices{4, 8, 10}));
  list = whole.begin_pass();
  EXPECT_EQ(list.indices, counted(8));
  EXPECT_EQ(list.ends, (Indices{4, 8}));
  whole.consumed_batch();
  EXPECT_EQ(sampler.position(), 4);
  BatchSampler none(sampler, 11, /*drop_last=*/true);
  EXPECT_TRUE(none.begin_pass().ends.empty());
  EXPECT_EQ(sampler.position(), 10) << "nothing is left";
  expect_refused([&] { BatchSampler(sampler, 0); }, "batch_size is 0");
}

// ---- What those that draw have in common ----

struct Drawing {
  const char* name;
  std::function<std::unique_ptr<ResumableSampler>()> make;
};

const Weights kWeights{1, 0.5, 3, 0.1, 2, 2, 2, 0.7};

std::vector<Drawing> of_one_process() {
  return {
      {"random", [] { return std::make_unique<RandomSampler>(20); }},
      {"replacing",
       [] {
         return std::make_unique<RandomSampler>(
             20, RandomSamplerOptions{.replacement = true, .num_samples = 33});
       }},
      {"several orders",
       [] {
         return std::make_unique<RandomSampler>(
             6, RandomSamplerOptions{.num_samples = 20});
       }},
      {"subset",
       [] {
         return std::make_unique<SubsetRandomSampler>(
             Indices{3, 1, 4, 15, 9, 2, 6, 5, 35, 8});
       }},
      {"weighted",
       [] { return std::make_unique<WeightedRandomSampler>(kWeights, 30); }},
      {"weighted once", [] {
         return std::make_unique<WeightedRandomSampler>(
             kWeights, 8, WeightedRandomSamplerOptions{.replacement = false});
       }}};
}

TEST(Samplers, WithoutSetEpochEachPassIsTheNextEpoch) {
  for (const Drawing& drawing : of_one_process()) {
    SCOPED_TRACE(drawing.name);
    auto sampler = drawing.make(), told = drawing.make();
    std::vector<Indices> passes;
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      passes.push_back(sampler->begin_pass());
      EXPECT_EQ(sampler->epoch(), epoch);
      told->set_epoch(epoch);
      EXPECT_EQ(told->begin_pass(), passes.back());
      EXPECT_EQ(told->epoch(), epoch);
    }
    EXPECT_NE(passes[0], passes[1]);
    EXPECT_NE(passes[1], passes[2]);
    // Told the epoch of the last pass, a sampler repeats it.
    sampler->set_epoch(2);
    EXPECT_EQ(sampler->begin_pass(), passes[2]);
  }
}

// The ranks of a group must agree: there a pass has the order of the epoch that
// they were told.
TEST(Samplers, DistributedOnesWaitForSetEpoch) {
  DistributedWeightedSampler sampler(kWeights, 30,
                                     {.num_replicas = 2, .rank = 1});
  const Indices first = sampler.begin_pass();
  EXPECT_EQ(sampler.begin_pass(), first);
  sampler.set_epoch(1);
  EXPECT_NE(sampler.begin_pass(), first);
}

TEST(Samplers, ResumeAtEveryPosition) {
  auto drawings = of_one_process();
  drawings.push_back(
      {"sequential", [] { return std::make_unique<SequentialSampler>(9); }});
  drawings.push_back(
      {"distributed weighted", [] {
         return std::make_unique<DistributedWeightedSampler>(
             kWeights, 30,
             DistributedWeightedSamplerOptions{.num_replicas = 1, .rank = 0});
       }});
  for (const Drawing& drawing : drawings) {
    SCOPED_TRACE(drawing.name);
    auto run = drawing.make();
    run->set_epoch(4);
    const Indices whole = run->begin_pass();
    for (size_t done = 0; done <= whole.size(); ++done) {
      auto resumed = drawing.make();
      resumed->load_state_dict(run->state_dict());
      EXPECT_EQ(resumed->state_dict(), run->state_dict());
      EXPECT_EQ(resumed->position(), static_cast<int64_t>(done));
      EXPECT_EQ(resumed->begin_pass(),
                Indices(whole.begin() + done, whole.end()));
      // The epoch after it, told or not.
      resumed->set_epoch(5);
      auto next = drawing.make();
      next->set_epoch(5);
      EXPECT_EQ(resumed->begin_pass(), next->begin_pass());
      run->consumed(1);
    }
  }
}

TEST(Samplers, RefuseTheStateOfAnotherOrder) {
  RandomSampler random(20);
  const auto state = random.state_dict();
  expect_refused(
      [&] { RandomSampler(20, {.num_samples = 5}).load_state_dict(state); },
      "RandomSampler: the state was saved with num_samples = 20, but this "
      "sampler has 5; make the sampler with the same option");
  expect_refused(
      [&] { RandomSampler(20, {.replacement = true}).load_state_dict(state); },
      "with replacement = false, but this sampler has true");
  expect_refused([&] { RandomSampler(21).load_state_dict(state); },
                 "for a dataset of 20 samples, but this dataset has 21");
  SubsetRandomSampler subset({1, 2, 3});
  expect_refused(
      [&] {
        SubsetRandomSampler({1, 0, 3}).load_state_dict(subset.state_dict());
      },
      "with other indices than this sampler has");
  WeightedRandomSampler weighted(Weights{1, 2}, 3);
  expect_refused(
      [&] {
        WeightedRandomSampler(Weights{2, 1}, 3)
            .load_state_dict(weighted.state_dict());
      },
      "with other weights than this sampler has");
  SequentialSampler sequential(20);
  expect_refused([&] { random.load_state_dict(sequential.state_dict()); },
                 "RandomSampler: the state has no entry \"num_samples\"");
}

}  // namespace
}  // namespace lockstep::internal

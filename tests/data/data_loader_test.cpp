#include "lockstep/data/data_loader.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <future>
#include <iterator>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/bucket_batch_sampler.h"
#include "lockstep/data/datasets/selected_samples.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/samplers.h"
#include "lockstep/data/tensor_dataset.h"
#include "tests/harness/kept_warnings.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Batches = std::vector<std::vector<int64_t>>;

// A user's dataset: no LibTorch base class, batches of any type, const. Sample
// i is the number i. Some batches take longer than later ones, to disturb the
// order.
struct Numbers {
  size_t length = 0;
  int64_t fails_at = -1;
  std::atomic<int>* running = nullptr;

  std::vector<int64_t> get_batch(c10::ArrayRef<size_t> indices) const {
    if (running) ++*running;
    std::this_thread::sleep_for(
        std::chrono::microseconds(200 + 300 * (indices.front() % 3)));
    if (running) --*running;
    std::vector<int64_t> batch(indices.begin(), indices.end());
    for (int64_t index : batch) {
      if (index == fails_at) {
        throw std::domain_error("no sample " + std::to_string(index));
      }
    }
    return batch;
  }
  size_t size() const { return length; }
};

template <class Loader>
Batches all_of(Loader& loader) {
  Batches batches;
  for (auto& batch : loader) batches.push_back(std::move(batch));
  return batches;
}

static_assert(std::input_iterator<DataLoader<Numbers>::Iterator>);
static_assert(
    std::is_same_v<DataLoader<TensorDataset>::Batch, torch::data::Example<>>);

TEST(DataLoader, CutsTheSamplersIndicesIntoBatches) {
  Numbers dataset{10};
  DistributedSampler sampler(10, {.shuffle = false});
  DataLoader loader(dataset, sampler, {.batch_size = 4});
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(all_of(loader), (Batches{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}}));

  DataLoader dropping(dataset, sampler, {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(dropping.size(), 2);
  EXPECT_EQ(all_of(dropping), (Batches{{0, 1, 2, 3}, {4, 5, 6, 7}}));

  const Numbers constant{10};
  DataLoader single(constant, sampler);
  EXPECT_EQ(single.size(), 10);
  EXPECT_EQ(all_of(single).back(), (std::vector<int64_t>{9}));
}

TEST(DataLoader, WorkersDoNotChangeTheBatches) {
  Numbers dataset{103};
  for (int64_t epoch : {0, 1}) {
    Batches expected;
    for (int64_t workers : {0, 1, 2, 4}) {
      for (int64_t ahead : {1, 3}) {
        DistributedSampler sampler(103, {.num_replicas = 2, .rank = 1});
        DataLoader loader(dataset, sampler,
                          {.batch_size = 4,
                           .num_workers = workers,
                           .prefetch_factor = ahead});
        sampler.set_epoch(epoch);
        Batches batches = all_of(loader);
        EXPECT_EQ(static_cast<int64_t>(batches.size()), loader.size());
        if (expected.empty()) expected = batches;
        EXPECT_EQ(batches, expected) << workers << " workers";
      }
    }
  }
}

// pytorch issue 73141: LibTorch's loader moves the sampler into itself, so
// set_epoch() on the caller's sampler has no effect.
TEST(DataLoader, SetEpochReachesTheLoop) {
  Numbers dataset{50};
  DistributedSampler sampler(50);
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, sampler,
                      {.batch_size = 5, .num_workers = workers});
    sampler.set_epoch(0);
    Batches first = all_of(loader);
    EXPECT_EQ(all_of(loader), first);
    sampler.set_epoch(1);
    EXPECT_NE(all_of(loader), first);
  }
}

// Workers had the modes of new threads: batches required gradients in a loop
// without gradients, and Autocast changed nothing.
TEST(DataLoader, WorkersHaveTheModesOfTheLoop) {
  struct Products {
    at::Tensor weight = torch::ones({2, 2}, torch::requires_grad());
    at::Tensor get(size_t) const { return weight.mm(weight); }
    size_t size() const { return 6; }
  };
  Products products;
  SequentialSampler sampler(6);
  for (const int64_t workers : {0, 1, 2}) {
    SCOPED_TRACE(workers);
    DataLoader loader(products, sampler, {.num_workers = workers});
    for (auto& batch : loader) {
      EXPECT_TRUE(batch.requires_grad());
      EXPECT_EQ(batch.scalar_type(), at::kFloat);
    }
    {
      const torch::NoGradGuard no_grad;
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
      at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
      for (auto& batch : loader) {
        EXPECT_FALSE(batch.requires_grad());
        EXPECT_EQ(batch.scalar_type(), at::kHalf);
      }
      at::autocast::set_autocast_dtype(at::kCPU, dtype);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
    }
    {
      const c10::InferenceMode inference;
      for (auto& batch : loader) EXPECT_TRUE(batch.is_inference());
    }
    for (auto& batch : loader) EXPECT_TRUE(batch.requires_grad());
  }
}

TEST(DataLoader, ALoopThatIsLeftEarlyWaitsForItsWorkers) {
  std::atomic<int> running{0};
  Numbers dataset{100, -1, &running};
  DistributedSampler sampler(100, {.shuffle = false});
  DataLoader loader(dataset, sampler, {.batch_size = 2, .num_workers = 3});
  for (size_t stop_after : {1, 2, 7}) {
    size_t seen = 0;
    for (auto& batch : loader) {
      EXPECT_EQ(batch.front(), static_cast<int64_t>(2 * seen));
      if (++seen == stop_after) break;
    }
    EXPECT_EQ(running.load(), 0);
    EXPECT_EQ(sampler.position(), static_cast<int64_t>(2 * stop_after));
  }
  EXPECT_EQ(all_of(loader).size(), 50u) << "the next loop is a whole pass";
}

// A dataset that remembers the threads that called it.
struct Callers {
  mutable std::mutex mutex;
  mutable std::set<std::thread::id> threads;

  int64_t get(size_t index) const {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    return static_cast<int64_t>(index);
  }
  size_t size() const { return 40; }
};

TEST(DataLoader, KeepsItsWorkersBetweenLoops) {
  Callers dataset;
  RandomSampler sampler(40);
  {
    DataLoader loader(dataset, sampler, {.batch_size = 2, .num_workers = 3});
    for (int pass = 0; pass < 20; ++pass) {
      int64_t seen = 0;
      for ([[maybe_unused]] auto& batch : loader) {
        if (++seen == 5 && pass % 2 == 1) break;
      }
      EXPECT_EQ(seen, pass % 2 == 1 ? 5 : 20);
    }
  }
  // A system may give the number of an ended thread to a new one, but not to as
  // many as there would be.
  EXPECT_LE(dataset.threads.size(), 3u);
  EXPECT_FALSE(dataset.threads.contains(std::this_thread::get_id()));
}

// Throws what the dataset, or the collate function, has thrown for a batch.
template <class Loader>
void rethrow_from(Loader& loader, int64_t& batches) {
  try {
    for ([[maybe_unused]] auto& batch : loader) ++batches;
  } catch (const DataLoaderError& error) {
    error.rethrow_nested();
  }
}

TEST(DataLoader, NamesTheBatchInWhichTheDatasetFailed) {
  Numbers dataset{20, 9};
  DistributedSampler sampler(20, {.shuffle = false});
  for (int64_t workers : {0, 1, 3}) {
    DataLoader loader(dataset, sampler,
                      {.batch_size = 4, .num_workers = workers});
    for (int attempt = 0; attempt < 2; ++attempt) {
      int64_t seen = 0;
      try {
        for ([[maybe_unused]] auto& batch : loader) ++seen;
        ADD_FAILURE() << "nothing was thrown";
      } catch (const DataLoaderError& error) {
        EXPECT_STREQ(error.what(),
                     "DataLoader: the dataset failed in batch 2 of this loop, "
                     "with the samples 8, 9, 10, 11: no sample 9");
        EXPECT_EQ(error.batch(), 2);
        EXPECT_EQ(error.indices(), (std::vector<size_t>{8, 9, 10, 11}));
      }
      EXPECT_EQ(seen, 2);
      EXPECT_EQ(sampler.position(), 8) << "the failed batch is not consumed";
      EXPECT_THAT([&] { rethrow_from(loader, seen); },
                  ThrowsMessage<std::domain_error>("no sample 9"));
    }
  }
}

// Samples one by one, without a base class; fails at one of them.
struct Halves {
  std::function<void()> fail = [] { throw std::domain_error("no half"); };

  double get(size_t index) const {
    if (index == 7) fail();
    return static_cast<double>(index) / 2;
  }
  size_t size() const { return 12; }
};

TEST(DataLoader, NamesTheSampleAtWhichTheDatasetFailed) {
  Halves dataset;
  SequentialSampler sampler(12);
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, sampler,
                      {.batch_size = 5, .num_workers = workers});
    static_assert(std::is_same_v<decltype(loader)::Batch, at::Tensor>);
    try {
      for ([[maybe_unused]] auto& batch : loader) {
      }
      ADD_FAILURE() << "nothing was thrown";
    } catch (const DataLoaderError& error) {
      EXPECT_STREQ(error.what(),
                   "DataLoader: the dataset failed at sample 7, in batch 1 of "
                   "this loop: no half");
      EXPECT_EQ(error.indices(), (std::vector<size_t>{7}));
    }
  }
  DataLoader loader(dataset, sampler, {.batch_size = 5});
  dataset.fail = [] { TORCH_CHECK_VALUE(false, "of torch"); };
  EXPECT_THAT(
      [&] { loader.begin().operator++(); },
      ThrowsMessage<DataLoaderError>(::testing::EndsWith("loop: of torch")));
  dataset.fail = [] { throw 3; };
  EXPECT_THAT([&] { loader.begin().operator++(); },
              ThrowsMessage<DataLoaderError>(
                  HasSubstr("an exception that is not a std::exception")));
}

TEST(DataLoader, SaysWhichBatchTookTooLong) {
  struct Stuck {
    std::shared_future<void> gate;
    int64_t get_batch(c10::ArrayRef<size_t>) const {
      gate.wait();
      return 0;
    }
    size_t size() const { return 1; }
  };
  std::promise<void> may_go_on;
  Stuck dataset{may_go_on.get_future().share()};
  DistributedSampler sampler(1);
  DataLoader loader(
      dataset, sampler,
      {.num_workers = 1, .timeout = std::chrono::milliseconds(5)});
  // The error leaves the loop although the dataset is still stuck.
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_THAT([&] { loader.begin(); },
                ThrowsMessage<std::runtime_error>(
                    HasSubstr("not fetched batch 0 of this loop after 5 ms")));
  }
  may_go_on.set_value();
  // It may take a while until the worker leaves the abandoned loops.
  bool is_back = false;
  while (!is_back) {
    try {
      EXPECT_EQ(*loader.begin(), 0);
      is_back = true;
    } catch (const std::runtime_error&) {
      std::this_thread::yield();
    }
  }
}

// The position counts the batches that the loop received, however far ahead the
// workers are.
TEST(DataLoader, ResumesAtEveryBatch) {
  Numbers dataset{23};
  const DistributedSamplerOptions part{.num_replicas = 2, .rank = 1, .seed = 3};
  for (int64_t workers : {0, 2}) {
    for (bool drop_last : {false, true}) {
      DataLoaderOptions options{.batch_size = 5,
                                .drop_last = drop_last,
                                .num_workers = workers,
                                .prefetch_factor = 4};
      DistributedSampler sampler(23, part);
      DataLoader loader(dataset, sampler, options);
      sampler.set_epoch(2);
      const Batches whole = all_of(loader);
      ASSERT_EQ(static_cast<int64_t>(whole.size()), loader.size());
      for (size_t done = 1; done <= whole.size(); ++done) {
        size_t seen = 0;
        std::map<std::string, int64_t> state;
        for ([[maybe_unused]] auto& batch : loader) {
          if (++seen == done) {
            state = sampler.state_dict();
            break;
          }
        }
        DistributedSampler other(23, part);
        DataLoader resumed(dataset, other, options);
        other.load_state_dict(state);
        other.set_epoch(2);
        EXPECT_EQ(all_of(resumed), Batches(whole.begin() + done, whole.end()));
        other.set_epoch(3);
        sampler.set_epoch(3);
        EXPECT_EQ(all_of(resumed), all_of(loader)) << "the epoch after it";
        sampler.set_epoch(2);
      }
    }
  }
}

TEST(DataLoader, AnEmptyPassHasNoBatches) {
  Numbers dataset{0};
  DistributedSampler sampler(0);
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, sampler, {.num_workers = workers});
    EXPECT_EQ(loader.size(), 0);
    EXPECT_TRUE(all_of(loader).empty());
  }
}

TEST(DataLoader, LoadsTensors) {
  TensorDataset dataset(torch::arange(12).view({6, 2}), torch::arange(6));
  DistributedSampler sampler(dataset, {.shuffle = false});
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, sampler,
                      {.batch_size = 4, .num_workers = workers});
    std::vector<torch::Tensor> data, targets;
    for (auto& batch : loader) {
      data.push_back(batch.data);
      targets.push_back(batch.target);
    }
    ASSERT_EQ(data.size(), 2u);
    EXPECT_TRUE(torch::equal(torch::cat(data), dataset.data()));
    EXPECT_TRUE(torch::equal(torch::cat(targets), dataset.target()));
  }
}

// Two datasets in LibTorch's own form.
struct Squares : torch::data::datasets::Dataset<Squares> {
  torch::data::Example<> get(size_t index) override {
    auto value = static_cast<int64_t>(index);
    return {torch::tensor({value}), torch::tensor(value * value)};
  }
  std::optional<size_t> size() const override { return 5; }
};
struct Lines
    : torch::data::datasets::Dataset<Lines, torch::data::TensorExample> {
  torch::data::TensorExample get(size_t index) override {
    return torch::full({3}, static_cast<int64_t>(index));
  }
  std::optional<size_t> size() const override { return 5; }
};

TEST(DataLoader, StacksTheSamplesOfLibTorchDatasets) {
  Squares plain;
  auto mapped = Squares().map(torch::data::transforms::Stack<>());
  DistributedSampler sampler(5, {.shuffle = false});
  auto check = [&](auto& dataset) {
    DataLoader loader(dataset, sampler, {.batch_size = 5});
    static_assert(
        std::is_same_v<decltype(*loader.begin()), torch::data::Example<>&>);
    EXPECT_EQ(loader.begin()->data.sizes(), (c10::IntArrayRef{5, 1}));
  };
  check(plain);
  check(mapped);

  DataLoader loader(plain, sampler, {.batch_size = 5});
  auto first = loader.begin();
  EXPECT_TRUE(torch::equal(first->data, torch::arange(5).view({5, 1})));
  EXPECT_TRUE(torch::equal(first->target, torch::tensor({0, 1, 4, 9, 16})));

  Lines lines;
  DataLoader unlabelled(lines, sampler, {.batch_size = 5});
  EXPECT_EQ(unlabelled.begin()->data.sizes(), (c10::IntArrayRef{5, 3}));
}

// A get_batch() of the dataset's own is taken even if there is get(), and what
// it returns are samples then.
struct Both {
  std::atomic<int>* batches;
  int64_t get(size_t) const { throw std::logic_error("not one by one"); }
  std::vector<int64_t> get_batch(c10::ArrayRef<size_t> indices) const {
    ++*batches;
    return {indices.begin(), indices.end()};
  }
  size_t size() const { return 6; }
};

TEST(DataLoader, TakesTheDatasetsOwnBatches) {
  std::atomic<int> batches{0};
  Both dataset{&batches};
  SequentialSampler sampler(6);
  DataLoader loader(dataset, sampler, {.batch_size = 3});
  static_assert(std::is_same_v<decltype(loader)::Batch, at::Tensor>);
  EXPECT_TRUE(torch::equal(*loader.begin(), torch::arange(3)));
  EXPECT_EQ(batches.load(), 1);
}

// If a batch fails as a whole, the loader looks for the sample.
TEST(DataLoader, FindsTheSampleThatMadeABatchFail) {
  struct Fails {
    bool only_as_batch = false;
    int64_t get(size_t index) const {
      if (index == 4 && !only_as_batch) throw std::domain_error("no sample 4");
      return static_cast<int64_t>(index);
    }
    std::vector<int64_t> get_batch(c10::ArrayRef<size_t> indices) const {
      if (only_as_batch) throw std::domain_error("no batch");
      std::vector<int64_t> batch;
      for (size_t index : indices) batch.push_back(get(index));
      return batch;
    }
    size_t size() const { return 6; }
  } dataset;
  SequentialSampler sampler(6);
  DataLoader loader(dataset, sampler, {.batch_size = 6});
  EXPECT_THAT([&] { loader.begin(); },
              ThrowsMessage<DataLoaderError>(HasSubstr(
                  "failed at sample 4, in batch 0 of this loop: no sample 4")));
  dataset.only_as_batch = true;
  EXPECT_THAT([&] { loader.begin(); },
              ThrowsMessage<DataLoaderError>(
                  HasSubstr("with the samples 0, 1, 2, 3, 4, 5: no batch")));
}

TEST(DataLoader, CollatesWithAFunction) {
  Halves halves;
  Numbers numbers{12};
  SequentialSampler sampler(12);
  for (int64_t workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 4, .num_workers = workers};
    // The function gets samples, or what a dataset without single ones gives.
    DataLoader summing(
        halves, sampler, options, [](std::vector<double> samples) {
          return std::accumulate(samples.begin(), samples.end(), 0.0);
        });
    EXPECT_EQ(*summing.begin(), 3.0);
    DataLoader counting(
        numbers, sampler, options,
        [](const std::vector<int64_t>& batch) { return batch.size(); });
    EXPECT_EQ(*counting.begin(), 4u);

    DataLoader failing(halves, sampler, options,
                       [](std::vector<double> samples) -> int {
                         throw std::out_of_range(std::to_string(samples[1]));
                       });
    try {
      failing.begin();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const DataLoaderError& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("the samples could not be collated in batch 0 of "
                            "this loop, with the samples 0, 1, 2, 3: 0.5"));
      EXPECT_THROW(error.rethrow_nested(), std::out_of_range);
    }
  }
}

TEST(DataLoader, AnErrorListsAFewSamplesOfALargeBatch) {
  Numbers dataset{30, 3};
  SequentialSampler sampler(30);
  DataLoader loader(dataset, sampler, {.batch_size = 30});
  EXPECT_THAT([&] { loader.begin(); },
              ThrowsMessage<DataLoaderError>(HasSubstr(
                  "samples 0, 1, 2, 3, 4, 5, 6, 7 and 22 more: no sample 3")));
}

TEST(DataLoader, TakesASamplerThatMakesTheBatches) {
  Numbers dataset{10};
  SequentialSampler sampler(10);
  for (bool drop_last : {false, true}) {
    BatchSampler batches(sampler, 4, drop_last);
    for (int64_t workers : {0, 2}) {
      DataLoader loader(dataset, batches, {.num_workers = workers});
      DataLoader same(dataset, sampler,
                      {.batch_size = 4, .drop_last = drop_last});
      EXPECT_EQ(loader.size(), same.size());
      EXPECT_EQ(all_of(loader), all_of(same));
      EXPECT_EQ(sampler.position(), 10);
    }
  }
  BatchSampler batches(sampler, 4);
  EXPECT_THAT([&] { DataLoader(dataset, batches, {.batch_size = 2}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "batch_size is given, but the sampler makes the batches")));
  EXPECT_THAT([&] { DataLoader(dataset, batches, {.drop_last = true}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("drop_last is")));
  SequentialSampler larger(11);
  BatchSampler too_many(larger, 4);
  EXPECT_THAT([&] { DataLoader(dataset, too_many); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "made for a dataset of 11 samples, but this one has 10")));
}

TEST(DataLoader, OneLoopAtATime) {
  Numbers dataset{4};
  DistributedSampler sampler(4);
  DataLoader loader(dataset, sampler);
  {
    auto first = loader.begin();
    EXPECT_THAT([&] { loader.begin(); },
                ThrowsMessage<std::logic_error>(
                    HasSubstr("a loop over this loader is still running")));
    EXPECT_EQ(sampler.position(), 1) << "the first loop is not disturbed";
  }
  EXPECT_EQ(all_of(loader).size(), 4u);
}

// HealedTraining keeps the iterator of a loop that the program has left.
TEST(DataLoader, AnIteratorMayOutliveItsLoader) {
  for (const int workers : {0, 2}) {
    Numbers dataset{4};
    DistributedSampler sampler(4);
    auto loader = std::make_unique<DataLoader<Numbers>>(
        dataset, sampler, DataLoaderOptions{.num_workers = workers});
    auto left = loader->begin();
    loader.reset();
    EXPECT_THAT([&] { ++left; }, ThrowsMessage<std::logic_error>(
                                     HasSubstr("does not exist any more")));
  }
}

// Two loaders of different lengths in one loop. Regression: a loop that was at
// its end counted as running until its iterator was destroyed.
TEST(DataLoader, AnIteratorAtTheEndCanBeginAgain) {
  for (const int workers : {0, 2}) {
    Numbers dataset{4};
    DistributedSampler sampler(4);
    DataLoader loader(dataset, sampler, {.num_workers = workers});
    auto batch = loader.begin();
    for (int64_t step = 0; step < 10; ++step) {
      if (batch == loader.end()) {
        sampler.set_epoch(step / 4);
        batch = loader.begin();
      }
      EXPECT_EQ(sampler.position(), step % 4 + 1);
      ++batch;
    }
  }
}

TEST(DataLoader, RefusesBadOptions) {
  Numbers dataset{4};
  DistributedSampler sampler(4);
  auto refuses = [&](DataLoaderOptions options, const char* message) {
    EXPECT_THAT([&] { DataLoader(dataset, sampler, options); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(message)));
  };
  refuses({.batch_size = 0}, "batch_size is 0; it must be 1 or more");
  refuses({.num_workers = -1}, "num_workers is -1; it must be 0 or more");
  refuses({.prefetch_factor = 0}, "prefetch_factor is 0");
  refuses({.timeout = std::chrono::milliseconds(-1)}, "timeout is -1 ms");
  refuses({.timeout = std::chrono::milliseconds(0)}, "none for no limit");
  refuses({.timeout = std::chrono::milliseconds(5)}, "num_workers is 0");

  DistributedSampler larger(5);
  EXPECT_THAT([&] { DataLoader(dataset, larger); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "made for a dataset of 5 samples, but this one has 4")));
}

// A sampler for fewer samples than the dataset has left the others out without
// a word.
TEST(DataLoader, RefusesASamplerThatWouldLeaveOutSamples) {
  Numbers dataset{4};
  const auto refuses = [&](auto& sampler) {
    EXPECT_THAT([&] { DataLoader loader(dataset, sampler); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(
                    "made for a dataset of 3 samples, but this one has 4")));
  };
  DistributedSampler part(3);
  BatchSampler batches(part, 2);
  WeightedRandomSampler weighted({1., 1., 1.}, 4);
  BucketBatchSampler buckets({1, 2, 3});
  refuses(part);
  refuses(batches);
  refuses(weighted);
  refuses(buckets);

  SubsetRandomSampler chosen({2, 0});
  BatchSampler chosen_batches(chosen, 2);
  EXPECT_EQ(DataLoader(dataset, chosen).size(), 2);
  EXPECT_EQ(DataLoader(dataset, chosen_batches).size(), 1);
  TakeDataset three(dataset, 3);
  EXPECT_EQ(DataLoader(three, part).size(), 3);
}

// With drop_last and a batch larger than the dataset a program trained on
// nothing, with exit code 0.
TEST(DataLoader, SaysOnceThatThereAreNoBatches) {
  const auto warning = [](const auto& make) {
    const testing::KeptWarnings warnings;
    make();
    return warnings.texts().empty() ? "" : warnings.texts().front();
  };
  Numbers dataset{10};
  DistributedSampler sampler(dataset, {.num_replicas = 2, .rank = 0});
  EXPECT_EQ(warning([&] { DataLoader(dataset, sampler, {.batch_size = 6}); }),
            "");
  EXPECT_EQ(warning([&] {
              DataLoader(dataset, sampler,
                         {.batch_size = 6, .drop_last = true});
            }),
            "DataLoader: there are no batches, so the loop will do nothing: of "
            "the dataset's 10 samples this rank visits 5, with batch_size 6 "
            "and drop_last");
  BatchSampler batches(sampler, 6, /*drop_last=*/true);
  EXPECT_THAT(warning([&] { DataLoader(dataset, batches); }),
              HasSubstr("makes no batches of this dataset of 10 samples"));
}

TEST(DataLoader, SamplersTakeTheDataset) {
  Numbers dataset{7};
  TensorDataset rows(torch::ones({7, 1}), torch::ones({7}));
  EXPECT_EQ(DistributedSampler(dataset).dataset_size(), 7);
  EXPECT_EQ(RandomSampler(rows).dataset_size(), 7);
  EXPECT_EQ(SequentialSampler(TakeDataset(rows, 3)).dataset_size(), 3);
  struct Endless {
    std::optional<size_t> size() const { return std::nullopt; }
  };
  EXPECT_THAT([] { SequentialSampler sampler{Endless()}; },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("does not know its size")));
}

}  // namespace
}  // namespace lockstep::internal

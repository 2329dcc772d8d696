// Exact resuming: an epoch that is stopped anywhere, and goes on with any
// number of ranks, batch size and number of workers, visits each of its samples
// once and in the order of an epoch that is not stopped.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>

#include "lockstep/data/bucket_batch_sampler.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/samplers.h"
#include "tests/harness/kept_warnings.h"

namespace lockstep::internal {
namespace {

using Order = std::vector<size_t>;
using State = std::map<std::string, int64_t>;

// A stretch of an epoch that the same ranks make: the world, and the number of
// steps after which they are stopped.
struct Stretch {
  int64_t ranks;
  int64_t batch_size;
  int64_t workers;
  int64_t steps;
};
constexpr int64_t kToTheEnd = 1 << 20;

struct IndexDataset {
  size_t length;
  size_t get(size_t index) const { return index; }
  std::optional<size_t> size() const { return length; }
};

// The samples that the ranks of a stretch visited, in the global order: those
// of one step after those of another, in a step those of all ranks in turns.
struct Visited {
  Order order;
  State state;              // as rank 0 would save it
  bool ranks_agree = true;  // on the state, and on the number of steps
};

// Makes each rank's loader with `loader_of(stretch, rank)`, a function that
// returns something with `run(steps, after_step)`.
template <class Rank>
Visited make_stretch(const Stretch& stretch, const State& from,
                     const std::function<Rank(int64_t rank)>& make) {
  std::vector<std::vector<Order>> steps_of;
  Visited visited;
  for (int64_t rank = 0; rank < stretch.ranks; ++rank) {
    Rank one = make(rank);
    one.load(from);
    std::vector<Order> steps = one.run(stretch.steps);
    if (rank == 0) visited.state = one.state();
    if (one.state() != visited.state ||
        (rank > 0 && steps.size() != steps_of[0].size())) {
      visited.ranks_agree = false;
    }
    steps_of.push_back(std::move(steps));
  }
  size_t most = 0;
  for (const auto& steps : steps_of) most = std::max(most, steps.size());
  for (size_t step = 0; step < most; ++step) {
    for (size_t turn = 0;; ++turn) {
      bool is_any = false;
      for (const auto& steps : steps_of) {
        if (step < steps.size() && turn < steps[step].size()) {
          visited.order.push_back(steps[step][turn]);
          is_any = true;
        }
      }
      if (!is_any) break;
    }
  }
  return visited;
}

Order identity_collate(std::vector<size_t> samples) { return samples; }

// A rank with a sampler.
template <class Sampler>
struct SamplerRank {
  std::unique_ptr<Sampler> sampler;
  IndexDataset dataset;
  DataLoaderOptions options;
  int64_t epoch;

  void load(const State& state) {
    sampler->load_state_dict(state);
    sampler->set_epoch(epoch);
  }
  State state() const { return sampler->state_dict(); }
  std::vector<Order> run(int64_t steps) {
    DataLoader loader(dataset, *sampler, options, identity_collate);
    std::vector<Order> batches;
    if (steps == 0) return batches;
    for (auto& batch : loader) {
      batches.push_back(batch);
      if (static_cast<int64_t>(batches.size()) == steps) break;
    }
    return batches;
  }
};

struct Kind {
  bool drop_last = false;  // of the sampler
  bool pad = true;
  bool drop_batch = false;  // drop_last of the loader
};

using DistributedRank = SamplerRank<DistributedSampler>;

Visited visit_distributed(int64_t size, const Kind& kind,
                          const Stretch& stretch, const State& from) {
  return make_stretch<DistributedRank>(stretch, from, [&](int64_t rank) {
    return DistributedRank{
        std::make_unique<DistributedSampler>(
            size, DistributedSamplerOptions{.num_replicas = stretch.ranks,
                                            .rank = rank,
                                            .seed = 3,
                                            .drop_last = kind.drop_last,
                                            .pad = kind.pad}),
        IndexDataset{static_cast<size_t>(size)},
        {.batch_size = stretch.batch_size,
         .drop_last = kind.drop_batch,
         .num_workers = stretch.workers},
        /*epoch=*/5};
  });
}

Order whole_order(int64_t size) {
  DistributedSampler sampler(size, {.num_replicas = 1, .rank = 0, .seed = 3});
  sampler.set_epoch(5);
  return sampler.indices();
}

// Whether `order` is the beginning of the order that is repeated without end.
bool is_prefix(const Order& order, const Order& whole) {
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != whole[i % whole.size()]) return false;
  }
  return true;
}

const std::vector<Kind> kKinds{{.pad = true},
                               {.pad = false},
                               {.drop_last = true},
                               {.pad = true, .drop_batch = true},
                               {.drop_last = true, .drop_batch = true}};

TEST(ResumeGrid, ThreeWorldsShareOneEpoch) {
  const testing::KeptWarnings no_batches;  // of small parts with drop_last
  const std::vector<std::pair<int64_t, int64_t>> worlds{{1, 1}, {1, 4}, {2, 3},
                                                        {3, 1}, {3, 2}, {4, 2}};
  for (int64_t size : {0, 1, 5, 23, 24}) {
    const Order whole = whole_order(size);
    for (const Kind& kind : kKinds) {
      for (auto [ranks_a, batch_a] : worlds) {
        for (auto [ranks_b, batch_b] : worlds) {
          for (int64_t steps_a : {0, 1, 2, 5}) {
            const Visited first = visit_distributed(
                size, kind, {ranks_a, batch_a, 0, steps_a}, {});
            const Visited second = visit_distributed(
                size, kind, {ranks_b, batch_b, 0, 1}, first.state);
            const Visited last = visit_distributed(
                size, kind, {2, 2, 0, kToTheEnd}, second.state);
            SCOPED_TRACE(::testing::Message()
                         << size << " samples, pad " << kind.pad
                         << ", drop_last " << kind.drop_last << " and "
                         << kind.drop_batch << "; " << ranks_a << " ranks of "
                         << batch_a << ", " << steps_a << " steps; then "
                         << ranks_b << " of " << batch_b);
            Order all;
            size_t least = whole.size(), most = whole.size();
            for (const auto* part : {&first, &second, &last}) {
              all.insert(all.end(), part->order.begin(), part->order.end());
              // Without padding the last step may be uneven.
              EXPECT_TRUE(part->ranks_agree || !kind.pad);
            }
            ASSERT_TRUE(is_prefix(all, whole));
            if (kind.drop_last || kind.drop_batch) {
              // The end of the order is left out: less than a step of the world
              // that came to it.
              const int64_t step =
                  std::max({ranks_a * batch_a, ranks_b * batch_b, int64_t{4}});
              least -= std::min<size_t>(least, step - 1);
            }
            if (kind.pad && !kind.drop_last) {
              most += std::max({ranks_a, ranks_b, int64_t{2}}) - 1;
            }
            ASSERT_GE(all.size(), least);
            ASSERT_LE(all.size(), size > 0 ? most : 0);
            // Nothing is left, whatever world loads the state.
            for (int64_t ranks : {1, 3}) {
              ASSERT_TRUE(visit_distributed(
                              size, kind, {ranks, 1, 0, kToTheEnd}, last.state)
                              .order.empty());
            }
          }
        }
      }
    }
  }
}

// The same with workers, which fetch ahead of what the loop has received.
TEST(ResumeGrid, WorkersDoNotMoveThePosition) {
  const Order whole = whole_order(41);
  for (int64_t workers : {0, 1, 3}) {
    for (int64_t steps : {1, 2, 4}) {
      const Visited first =
          visit_distributed(41, {}, {2, 3, workers, steps}, {});
      const Visited second =
          visit_distributed(41, {}, {3, 2, 4 - workers, 1}, first.state);
      const Visited last =
          visit_distributed(41, {}, {1, 4, 1, kToTheEnd}, second.state);
      Order all;
      for (const auto* part : {&first, &second, &last}) {
        all.insert(all.end(), part->order.begin(), part->order.end());
      }
      EXPECT_EQ(first.order.size(), static_cast<size_t>(6 * steps));
      EXPECT_EQ(all, whole);
    }
  }
}

TEST(ResumeGrid, WeightedDrawsAreSharedTheSameWay) {
  const std::vector<double> weights{1, 2, 0.5, 3, 1, 1, 4};
  using Rank = SamplerRank<DistributedWeightedSampler>;
  const auto visit_weighted = [&](const Stretch& stretch, const State& from) {
    return make_stretch<Rank>(stretch, from, [&](int64_t rank) {
      return Rank{
          std::make_unique<DistributedWeightedSampler>(
              weights, 37,
              DistributedWeightedSamplerOptions{
                  .num_replicas = stretch.ranks, .rank = rank, .pad = false}),
          IndexDataset{7},
          {.batch_size = stretch.batch_size, .num_workers = stretch.workers},
          /*epoch=*/5};
    });
  };
  const Order whole = visit_weighted({1, 1, 0, kToTheEnd}, {}).order;
  ASSERT_EQ(whole.size(), 37u);
  for (int64_t ranks : {1, 2, 3, 5}) {
    for (int64_t steps : {0, 1, 3}) {
      const Visited first = visit_weighted({ranks, 2, 0, steps}, {});
      const Visited rest = visit_weighted({2, 3, 2, kToTheEnd}, first.state);
      Order all = first.order;
      all.insert(all.end(), rest.order.begin(), rest.order.end());
      EXPECT_EQ(all, whole);
    }
  }
}

// ---- Buckets ----

struct BucketRank {
  std::unique_ptr<BucketBatchSampler> sampler;
  IndexDataset dataset;
  int64_t workers;

  void load(const State& state) {
    sampler->load_state_dict(state);
    sampler->set_epoch(5);
  }
  State state() const { return sampler->state_dict(); }
  std::vector<Order> run(int64_t steps) {
    DataLoader loader(dataset, *sampler, {.num_workers = workers},
                      identity_collate);
    std::vector<Order> batches;
    if (steps == 0) return batches;
    for (auto& batch : loader) {
      batches.push_back(batch);
      if (static_cast<int64_t>(batches.size()) == steps) break;
    }
    return batches;
  }
};

Order without_repeated(const Order& order) {
  Order once;
  for (const size_t sample : order) {
    if (std::ranges::find(once, sample) == once.end()) once.push_back(sample);
  }
  return once;
}

TEST(ResumeGrid, BucketsKeepTheirOrder) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 61; ++i) lengths.push_back(i * 37 % 50);
  const auto visit_buckets = [&](const BucketBatchSamplerOptions& way,
                                 const Stretch& stretch, const State& from) {
    return make_stretch<BucketRank>(stretch, from, [&](int64_t rank) {
      BucketBatchSamplerOptions options = way;
      options.batch_size = stretch.batch_size;
      options.num_replicas = stretch.ranks;
      options.rank = rank;
      return BucketRank{std::make_unique<BucketBatchSampler>(lengths, options),
                        IndexDataset{lengths.size()}, stretch.workers};
    });
  };
  const std::vector<Stretch> worlds{
      {1, 1, 0, 0}, {1, 6, 2, 0}, {2, 3, 0, 0}, {3, 2, 0, 0}, {4, 2, 0, 0}};
  for (const BucketBatchSamplerOptions& way :
       {BucketBatchSamplerOptions{.boundaries = {10, 30}},
        BucketBatchSamplerOptions{.window = 2},
        BucketBatchSamplerOptions{.boundaries = {10, 30}, .pad = false},
        BucketBatchSamplerOptions{.window = 2, .pad = false},
        BucketBatchSamplerOptions{.boundaries = {10, 30}, .drop_last = true},
        BucketBatchSamplerOptions{.window = 2, .drop_last = true}}) {
    for (Stretch a : worlds) {
      a.steps = kToTheEnd;
      // The order is that of the world that began the epoch.
      const Order whole = visit_buckets(way, a, {}).order;
      for (Stretch b : worlds) {
        for (int64_t steps : {0, 1, 3}) {
          a.steps = steps;
          b.steps = 1;
          // Without a step nothing of the order is fixed yet: it is b's.
          if (steps == 0) continue;
          const Visited first = visit_buckets(way, a, {});
          const Visited second = visit_buckets(way, b, first.state);
          const Visited last =
              visit_buckets(way, {2, 2, 1, kToTheEnd}, second.state);
          Order all;
          for (const auto* part : {&first, &second, &last}) {
            all.insert(all.end(), part->order.begin(), part->order.end());
          }
          SCOPED_TRACE(::testing::Message()
                       << a.ranks << " ranks of " << a.batch_size << ", "
                       << steps << " steps; then " << b.ranks << " of "
                       << b.batch_size << "; drop_last " << way.drop_last);
          if (way.pad && !way.drop_last) {
            // Repeated samples are repeated in their own step.
            ASSERT_TRUE(first.ranks_agree && second.ranks_agree &&
                        last.ranks_agree);
            ASSERT_EQ(without_repeated(all), without_repeated(whole));
          } else if (way.drop_last) {
            ASSERT_LE(all.size(), whole.size());
            ASSERT_GT(all.size() + b.ranks * b.batch_size + 4, whole.size());
            ASSERT_TRUE(is_prefix(all, whole));
          } else {
            ASSERT_EQ(all, whole);
          }
          for (int64_t ranks : {1, 3}) {
            ASSERT_TRUE(visit_buckets(way, {ranks, 1, 0, kToTheEnd}, last.state)
                            .order.empty());
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::internal

// The arithmetic of `lockstep report trace`: sets of moments, and where the
// time of a step goes. Random cases are compared with a count of every
// nanosecond.
#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "lockstep/cli/report/step_time.h"
#include "lockstep/cli/report/trace_events.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kEnd = 60;  // random moments are from 0 to kEnd

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  // From 0 to most.
  int64_t number(int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(engine_);
  }
  Interval interval() {
    const int64_t begin = number(kEnd);
    return {begin, begin + number((kEnd - begin) / 2)};
  }

 private:
  std::mt19937 engine_;
};

bool holds(const std::vector<Interval>& set, int64_t moment) {
  return std::ranges::any_of(set, [&](Interval each) {
    return each.begin <= moment && moment < each.end;
  });
}

void expect_normal(const Intervals& set) {
  for (size_t i = 0; i < set.size(); ++i) {
    EXPECT_LT(set[i].begin, set[i].end);
    if (i > 0) {
      EXPECT_LT(set[i - 1].end, set[i].begin);
    }
  }
}

TEST(Interval, SetsOfMomentsByHand) {
  EXPECT_THAT(united({{5, 7}, {1, 3}, {2, 4}, {4, 5}, {9, 9}}),
              ElementsAre(Interval{1, 7}));
  const Intervals a{{0, 10}, {20, 30}};
  const Intervals b{{5, 22}, {28, 29}};
  EXPECT_THAT(unite(a, b), ElementsAre(Interval{0, 30}));
  EXPECT_THAT(intersect(a, b),
              ElementsAre(Interval{5, 10}, Interval{20, 22}, Interval{28, 29}));
  EXPECT_THAT(subtract(a, b),
              ElementsAre(Interval{0, 5}, Interval{22, 28}, Interval{29, 30}));
  EXPECT_THAT(clip(a, {10, 25}), ElementsAre(Interval{20, 25}));
  EXPECT_THAT(clip(a, {10, 20}), IsEmpty());
  EXPECT_EQ(total_length(a), 20);
}

TEST(Interval, RandomSetsAreThoseOfTheirMoments) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<Interval> parts[2];
    for (auto& some : parts) {
      for (int64_t i = random.number(8); i > 0; --i) {
        some.push_back(random.interval());
      }
    }
    const Intervals a = united(parts[0]);
    const Intervals b = united(parts[1]);
    const Interval window = random.interval();
    const Intervals sets[] = {a, unite(a, b), intersect(a, b), subtract(a, b),
                              clip(a, window)};
    int64_t length = 0;
    for (int64_t moment = 0; moment <= 2 * kEnd; ++moment) {
      const bool in_a = holds(parts[0], moment);
      const bool in_b = holds(parts[1], moment);
      length += in_a;
      ASSERT_EQ(holds(sets[0], moment), in_a);
      ASSERT_EQ(holds(sets[1], moment), in_a || in_b);
      ASSERT_EQ(holds(sets[2], moment), in_a && in_b);
      ASSERT_EQ(holds(sets[3], moment), in_a && !in_b);
      ASSERT_EQ(holds(sets[4], moment), in_a && holds({window}, moment));
    }
    EXPECT_EQ(total_length(a), length);
    for (const Intervals& set : sets) expect_normal(set);
  }
}

TraceThread thread_of(std::vector<TraceActivity> activities,
                      bool on_device = false) {
  std::ranges::stable_sort(activities, [](const auto& a, const auto& b) {
    return a.time.begin != b.time.begin ? a.time.begin < b.time.begin
                                        : a.time.end > b.time.end;
  });
  return {on_device, std::move(activities)};
}

// Counts the nanoseconds of the step one by one, as docs/trace-report.md
// defines them.
StepTime counted(const std::vector<TraceThread>& threads, Interval step) {
  const bool gpu = std::ranges::any_of(threads, [](const TraceThread& thread) {
    return thread.on_device && !thread.activities.empty();
  });
  StepTime time;
  for (int64_t moment = step.begin; moment < step.end; ++moment) {
    bool computes = false, optimizes = false, communicates = false;
    bool in_optimizer = false, in_compute = false;
    bool in_snapshot = false, in_loader = false;
    for (const TraceThread& thread : threads) {
      const auto& all = thread.activities;
      bool leaf = false, compute = false, optimizer = false;
      bool waits = false, snapshot = false, loader = false;
      bool background = false;
      for (size_t i = 0; i < all.size(); ++i) {
        if (!holds({all[i].time}, moment)) continue;
        const Activity activity = all[i].activity;
        waits |= activity == Activity::communication ||
                 (activity == Activity::communication_call && !gpu);
        communicates |= activity == Activity::communication_in_flight;
        snapshot |= activity == Activity::snapshot;
        loader |= activity == Activity::loader;
        background |= activity == Activity::background;
        if (activity != Activity::compute && activity != Activity::operators &&
            activity != Activity::optimizer) {
          continue;
        }
        (activity == Activity::optimizer ? optimizer : compute) = true;
        bool is_leaf = true;
        for (size_t j = i + 1; j < all.size() && activity != Activity::compute;
             ++j) {
          const bool outlives =
              all[j].activity == Activity::communication_in_flight &&
              all[j].time.end > all[i].time.end;
          is_leaf &= all[j].time.begin >= all[i].time.end || outlives;
        }
        leaf |= is_leaf;
      }
      communicates |= waits;
      in_snapshot |= snapshot && !waits;
      in_loader |= loader && !waits;
      if (waits || snapshot || loader || background) continue;
      if (gpu && !thread.on_device) continue;
      computes |= leaf;
      optimizes |= leaf && optimizer;
      in_optimizer |= optimizer && !gpu;
      in_compute |= compute && !gpu;
    }
    time.overlapped += computes && communicates;
    ++(computes       ? (optimizes ? time.optimizer : time.compute)
       : in_snapshot  ? time.snapshot
       : in_loader    ? time.loader
       : communicates ? time.exposed
       : in_optimizer ? time.optimizer
       : in_compute   ? time.compute
                      : time.idle);
  }
  return time;
}

void expect_equal(const StepTime& time, const StepTime& expected) {
  EXPECT_EQ(time.compute, expected.compute);
  EXPECT_EQ(time.optimizer, expected.optimizer);
  EXPECT_EQ(time.exposed, expected.exposed);
  EXPECT_EQ(time.loader, expected.loader);
  EXPECT_EQ(time.snapshot, expected.snapshot);
  EXPECT_EQ(time.idle, expected.idle);
  EXPECT_EQ(time.overlapped, expected.overlapped);
}

TEST(StepTime, EveryNanosecondOfRandomTracesIsCountedOnce) {
  constexpr Activity kKinds[] = {
      Activity::compute,
      Activity::operators,
      Activity::communication,
      Activity::communication_in_flight,
      Activity::communication_call,
      Activity::optimizer,
      Activity::loader,
      Activity::snapshot,
      Activity::background,
  };
  for (unsigned seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::vector<TraceThread> threads;
    for (int64_t thread = random.number(2); thread >= 0; --thread) {
      std::vector<TraceActivity> activities;
      for (int64_t i = random.number(8); i > 0; --i) {
        activities.push_back(
            {random.interval(), kKinds[random.number(std::size(kKinds) - 1)]});
      }
      threads.push_back(thread_of(activities, random.number(5) == 0));
    }
    const Interval step = random.interval();
    const StepTime time = step_time(rank_activity(threads), step);
    EXPECT_EQ(time.total(), step.length());
    expect_equal(time, counted(threads, step));
    if (HasFailure()) break;
  }
}

TEST(StepTime, CommunicationCountsAsOverlappedOnlyWhileAnOperatorRuns) {
  // The node of backward holds an operator, which starts a collective, and then
  // its thread waits for that.
  const auto thread =
      thread_of({{{0, 100}, Activity::operators},
                 {{0, 20}, Activity::compute},
                 {{15, 90}, Activity::communication_in_flight}});
  const StepTime time = step_time(rank_activity({thread}), {0, 100});
  EXPECT_EQ(time.overlapped, 5);
  EXPECT_EQ(time.exposed, 70);
  EXPECT_EQ(time.compute, 30);
}

// The own time of aten::addmm, which holds aten::copy_ and is nearly all of it,
// counted as exposed beside an asynchronous collective, and a rank as a
// straggler.
TEST(StepTime, AnOperatorThatHoldsAnotherComputesAllItsTime) {
  const auto thread =
      thread_of({{{20, 60}, Activity::compute}, {{21, 22}, Activity::compute}});
  const auto other = thread_of({{{10, 70}, Activity::communication_in_flight}});
  const StepTime time = step_time(rank_activity({thread, other}), {0, 100});
  EXPECT_EQ(time.compute, 40);
  EXPECT_EQ(time.overlapped, 40);
  EXPECT_EQ(time.exposed, 20);
}

TEST(StepTime, WhatAThreadDoesInsideLoaderAndSnapshotIsAPartOfThem) {
  const auto thread = thread_of({{{0, 10}, Activity::loader},
                                 {{2, 8}, Activity::compute},
                                 {{20, 50}, Activity::snapshot},
                                 {{25, 30}, Activity::communication},
                                 {{30, 45}, Activity::compute}});
  // Another thread's snapshot is hidden as long as this one computes.
  const auto other = thread_of({{{0, 12}, Activity::snapshot}});
  const StepTime time = step_time(rank_activity({thread, other}), {0, 60});
  EXPECT_EQ(time.compute, 0);
  EXPECT_EQ(time.snapshot, 12 + 25);
  EXPECT_EQ(time.exposed, 5);
  EXPECT_EQ(time.loader, 0);
  EXPECT_EQ(time.idle, 18);
}

// The all_reduce of a step ended on Gloo's thread while the training thread
// loaded the next batch, and the time counted as exposed communication.
TEST(StepTime, CommunicationOfAnotherThreadDoesNotHideTheLoader) {
  const auto thread = thread_of({{{0, 10}, Activity::loader}});
  const auto other = thread_of({{{0, 4}, Activity::communication_in_flight},
                                {{4, 12}, Activity::communication}});
  const StepTime time = step_time(rank_activity({thread, other}), {0, 20});
  EXPECT_EQ(time.loader, 10);
  EXPECT_EQ(time.exposed, 2);
  EXPECT_EQ(time.idle, 8);
}

TEST(StepTime, OfAGpuOnlyKernelsCompute) {
  const auto host = thread_of({{{0, 40}, Activity::compute},
                               {{40, 45}, Activity::communication_call},
                               {{90, 100}, Activity::loader}});
  const auto stream = thread_of({{{10, 30}, Activity::compute},
                                 {{50, 80}, Activity::optimizer},
                                 {{50, 60}, Activity::compute},
                                 {{70, 75}, Activity::compute}},
                                true);
  const auto nccl = thread_of({{{25, 45}, Activity::communication}}, true);
  const StepTime time =
      step_time(rank_activity({host, stream, nccl}), {0, 100});
  EXPECT_EQ(time.compute, 20);
  EXPECT_EQ(time.optimizer, 15);
  EXPECT_EQ(time.overlapped, 5);
  EXPECT_EQ(time.exposed, 15);
  EXPECT_EQ(time.loader, 10);
  EXPECT_EQ(time.idle, 40);
}

TEST(StepTime, OfOperationsInsideEachOtherTheOuterOneCounts) {
  auto thread = thread_of({{{0, 10}, Activity::compute, 100},
                           {{2, 8}, Activity::compute, 60},
                           {{10, 12}, Activity::compute, 7},
                           {{30, 31}, Activity::compute, 1000}});
  EXPECT_EQ(flops_within({thread}, {0, 20}), 107);
  EXPECT_EQ(flops_within({thread, thread}, {10, 40}), 2 * 1007);
}

StepTime step_of(int64_t compute, int64_t exposed, int64_t loader = 0) {
  StepTime time;
  time.compute = compute;
  time.exposed = exposed;
  time.loader = loader;
  return time;
}

TEST(Straggler, IsTheRankThatWaitsLeast) {
  const Balance balance =
      compare_ranks({{0, {step_of(60, 40), step_of(60, 40)}},
                     {2, {step_of(60, 2, 38), step_of(60, 0, 40)}},
                     {3, {step_of(61, 39), step_of(62, 38)}}});
  EXPECT_EQ(balance.steps, 2u);
  ASSERT_EQ(balance.stragglers.size(), 1u);
  const Straggler& one = balance.stragglers[0];
  EXPECT_EQ(one.rank, 2);
  EXPECT_EQ(one.own_ns, 99);     // the mean of 98 and 100
  EXPECT_EQ(one.others_ns, 60);  // between 60 and 61
  EXPECT_EQ(one.reason, "loader");
  EXPECT_EQ(one.reason_ns, 39);
  EXPECT_EQ(one.slower_steps, 2u);
  EXPECT_EQ(balance.lost_ns, (98 - 61 + 100 - 62) / 2);
  EXPECT_DOUBLE_EQ(balance.spread, 39.0 / 99);
}

TEST(Straggler, SeveralAreSortedAndEqualRanksAreNone) {
  const auto slow = step_of(100, 0);
  const auto slower = step_of(110, 0);
  const auto fast = step_of(50, 60);
  const Balance two = compare_ranks(
      {{0, {slow}}, {1, {fast}}, {2, {slower}}, {3, {fast}}, {4, {fast}}});
  ASSERT_EQ(two.stragglers.size(), 2u);
  EXPECT_EQ(two.stragglers[0].rank, 2);
  EXPECT_EQ(two.stragglers[1].rank, 0);
  EXPECT_EQ(two.lost_ns, 60);
  // 5 % more is not noticeable, nor is one slow step of three.
  EXPECT_THAT(compare_ranks({{0, {step_of(100, 0)}}, {1, {step_of(105, 0)}}})
                  .stragglers,
              IsEmpty());
  EXPECT_THAT(compare_ranks({{0, {fast, fast, fast}}, {1, {fast, slow, fast}}})
                  .stragglers,
              IsEmpty());
  EXPECT_EQ(compare_ranks({{0, {slow}}}).steps, 0u);
  EXPECT_EQ(compare_ranks({{0, {}}, {1, {}}}).steps, 0u);
}

// Workers make the batches of rank 0 in bursts: it waits for one batch of four,
// and rank 1, whose loader is quick, takes a little longer in the others.
TEST(Straggler, IsARankThatIsSlowInFewStepsButAgainAndAgain) {
  std::vector<StepTime> bursts, steady;
  for (int step = 0; step < 12; ++step) {
    const bool waits = step % 4 == 1;
    bursts.push_back(waits ? step_of(10, 0, 400) : step_of(10, 3));
    steady.push_back(waits ? step_of(12, 398) : step_of(12, 1));
  }
  const Balance balance = compare_ranks({{0, bursts}, {1, steady}});
  ASSERT_EQ(balance.stragglers.size(), 1u);
  const Straggler& one = balance.stragglers[0];
  EXPECT_EQ(one.rank, 0);
  EXPECT_EQ(one.own_ns, 110);
  EXPECT_EQ(one.others_ns, 12);
  EXPECT_EQ(one.reason, "loader");
  EXPECT_EQ(one.reason_ns, 100);
  EXPECT_EQ(one.slower_steps, 3u);
  EXPECT_EQ(balance.lost_ns, 3 * 398 / 12);
}

TEST(Straggler, AreNotRanksThatAreSlowInTurnNorOnesSlowOnce) {
  for (const size_t world : {2, 3, 4}) {
    std::vector<RankSteps> turns(world);
    for (size_t rank = 0; rank < world; ++rank) {
      for (size_t step = 0; step < 13; ++step) {  // rank 0 has one more
        turns[rank].steps.push_back(step % world == rank ? step_of(200, 10)
                                                         : step_of(10, 200));
      }
    }
    EXPECT_THAT(compare_ranks(turns).stragglers, IsEmpty()) << world;
  }
  // All are slow in the first step, and rank 0 once more.
  std::vector<StepTime> once(20, step_of(10, 1));
  once[0] = step_of(5000, 0);
  std::vector<StepTime> never = once;
  once[7] = step_of(1000, 0);
  never[7] = step_of(10, 990);
  const Balance balance = compare_ranks({{0, once}, {1, never}});
  EXPECT_THAT(balance.stragglers, IsEmpty());
  EXPECT_EQ(balance.lost_ns, 0);
}

// Ranks whose own times vary by chance: one of them is a little slower in the
// mean, and was called a straggler.
TEST(Straggler, IsNotNoise) {
  std::vector<StepTime> first;
  std::vector<StepTime> second;
  for (const int64_t more : {40, -20, 40, -20, 40, -10, 35, -15, 40, -20}) {
    first.push_back(step_of(50 + more, 50 - more));
    second.push_back(step_of(50, 50));
  }
  const Balance noise = compare_ranks({{0, first}, {1, second}});
  EXPECT_THAT(noise.stragglers, IsEmpty());
  EXPECT_EQ(noise.lost_ns, 0);
  ASSERT_EQ(noise.doubtful.size(), 1u);
  EXPECT_EQ(noise.doubtful[0].rank, 0);
  EXPECT_EQ(noise.doubtful[0].own_ns - noise.doubtful[0].others_ns, 11);
  EXPECT_NEAR(static_cast<double>(noise.doubtful[0].spread_ns), 29, 2);

  // If it is slower by as much as that varies, it is one.
  for (StepTime& step : first) step.compute += 20;
  const Balance slow = compare_ranks({{0, first}, {1, second}});
  ASSERT_EQ(slow.stragglers.size(), 1u);
  EXPECT_THAT(slow.doubtful, IsEmpty());
  EXPECT_NEAR(static_cast<double>(slow.stragglers[0].spread_ns), 29, 2);
}

// Few reports may name one of several ranks that vary by a fifth of a step.
TEST(Straggler, IsSeldomFoundAmongEqualRanks) {
  std::mt19937 engine(7);
  std::normal_distribution<double> own(500, 200);
  for (const int world : {2, 4, 8}) {
    int named = 0;
    for (int report = 0; report < 400; ++report) {
      std::vector<RankSteps> ranks;
      for (int rank = 0; rank < world; ++rank) {
        ranks.push_back({rank, {}});
        for (int step = 0; step < 20; ++step) {
          const auto time = static_cast<int64_t>(own(engine));
          ranks.back().steps.push_back(step_of(time, 1000 - time));
        }
      }
      if (!compare_ranks(ranks).stragglers.empty()) ++named;
    }
    EXPECT_LT(named, 25) << world;
  }
}

TEST(OperatorFlops, AreThoseOfProductsAndConvolutions) {
  const auto flops = [](const char* name,
                        std::vector<std::vector<double>> sizes,
                        std::vector<std::string> values = {}) {
    return operator_flops(name, {std::move(sizes), std::move(values)});
  };
  EXPECT_EQ(flops("aten::mm", {{2, 3}, {3, 4}}), 2 * 2 * 3 * 4);
  EXPECT_EQ(flops("aten::baddbmm", {{5}, {6, 2, 3}, {6, 3, 4}}),
            2 * 6 * 2 * 3 * 4);
  EXPECT_EQ(flops("aten::mm", {{2, 3}}), 0);
  EXPECT_EQ(flops("aten::relu", {{2, 3}, {3, 4}}), 0);

  // Two images of 4 channels, 8 by 8; 8 kernels in two groups, 3 by 3, which
  // give 4 by 4 places each.
  const std::vector<std::vector<double>> sizes{
      {2, 4, 8, 8}, {8, 2, 3, 3}, {8}, {}, {}, {}, {}, {}, {}};
  const double forward = 2.0 * (2 * 8 * 4 * 4) * (2 * 3 * 3);
  EXPECT_EQ(
      flops("aten::convolution", sizes,
            {"", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2"}),
      forward);
  EXPECT_EQ(flops("aten::convolution", sizes,
                  {"", "", "", "[2]", "[1]", "[1]", "False", "[0]", "2"}),
            forward);
  // A transposed one: each place of the input meets 4 by 2 by 2 weights.
  EXPECT_EQ(
      flops("aten::convolution",
            {{2, 8, 4, 4}, {8, 4, 2, 2}, {4}, {}, {}, {}, {}, {}, {}},
            {"", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"}),
      2.0 * (2 * 8 * 4 * 4) * (4 * 2 * 2));
  const auto backward = [&](const char* mask) {
    return flops("aten::convolution_backward",
                 {{2, 8, 4, 4},
                  {2, 4, 8, 8},
                  {8, 2, 3, 3},
                  {},
                  {},
                  {},
                  {},
                  {},
                  {},
                  {},
                  {}},
                 {"", "", "", "[8]", "[2, 2]", "[1, 1]", "[1, 1]", "False",
                  "[0, 0]", "2", mask});
  };
  EXPECT_EQ(backward("[True, True, True]"), 2 * forward);
  EXPECT_EQ(backward("[False, True, True]"), forward);
  EXPECT_EQ(backward("[True, False, False]"), forward);
  EXPECT_EQ(backward("[False, False, True]"), 0);
  // A trace may have the sizes alone, or anything else.
  EXPECT_EQ(flops("aten::convolution", sizes), 0);
  EXPECT_EQ(flops("aten::convolution", sizes,
                  {"", "", "", "[0, 0]", "x", "[]", "False", "", ""}),
            0);
  EXPECT_EQ(flops("aten::convolution_backward", sizes,
                  {"", "", "", "", "", "", "", "", "", "", "True"}),
            0);
}

// A small part of a step does not matter, however large a part of the own time
// it is.
TEST(Straggler, IsMoreThanAFewPerCentOfAStepSlower) {
  EXPECT_THAT(
      compare_ranks({{0, {step_of(8, 92)}}, {1, {step_of(4, 96)}}}).stragglers,
      IsEmpty());
  EXPECT_EQ(compare_ranks({{0, {step_of(10, 90)}}, {1, {step_of(4, 96)}}})
                .stragglers.size(),
            1u);
}

TEST(Straggler, MedianOfEvenlyManyIsBetweenTheMiddleTwo) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({5, 1, 9}), 5);
  EXPECT_EQ(median({9, 1, 5, 2}), 3);
}

TEST(ActivityTable, NamesOfLockstepAndOfPython) {
  const auto activity = [](const char* name, const char* category) {
    return activity_of(name, category);
  };
  EXPECT_EQ(activity("aten::mm", "cpu_op"), Activity::compute);
  EXPECT_EQ(activity("aten::mm", "python_function"), Activity::none);
  EXPECT_EQ(
      activity("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op"),
      Activity::operators);
  EXPECT_EQ(activity("DistributedDataParallel.forward", "user_annotation"),
            Activity::none);
  EXPECT_EQ(activity("c10d::allreduce_", "cpu_op"),
            Activity::communication_call);
  EXPECT_EQ(activity("record_param_comms", "cpu_op"),
            Activity::communication_call);
  EXPECT_EQ(activity("gloo:all_reduce", "user_annotation"),
            Activity::communication_in_flight);
  EXPECT_EQ(activity("nccl:all_reduce", "gpu_user_annotation"), Activity::none);
  EXPECT_EQ(activity("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "kernel"),
            Activity::communication);
  EXPECT_EQ(activity("sgemm", "kernel"), Activity::compute);
  EXPECT_EQ(activity("Optimizer.step#SGD.step", "user_annotation"),
            Activity::optimizer);
  EXPECT_EQ(
      activity("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
               "user_annotation"),
      Activity::loader);
  const auto span = [](const char* name) {
    return activity_of(name, "user_annotation");
  };
  EXPECT_EQ(span("lockstep::data::wait"), Activity::loader);
  EXPECT_EQ(span("lockstep::data::fetch"), Activity::background);
  EXPECT_EQ(span("lockstep::snapshot::save"), Activity::snapshot);
  EXPECT_EQ(span("lockstep::snapshot::write"), Activity::background);
  EXPECT_EQ(span("lockstep::optim::step"), Activity::optimizer);
  EXPECT_EQ(span("lockstep::comm::wait"), Activity::communication);
  EXPECT_EQ(span("lockstep::zero::step"), Activity::optimizer);
  EXPECT_EQ(span("lockstep::zero::gather"), Activity::communication);
  EXPECT_EQ(span("lockstep::ddp::wait"), Activity::communication);
  EXPECT_EQ(span("lockstep::ddp::rebuild_buckets"), Activity::none);
  EXPECT_EQ(span("lockstep::comm_thread::all_reduce"), Activity::communication);
  EXPECT_EQ(span("lockstep::pipeline::0F1"), Activity::none);
  EXPECT_EQ(activity("ProfilerStep#3", "user_annotation"), Activity::step);
  EXPECT_EQ(activity("ProfilerStep#3", "gpu_user_annotation"), Activity::none);
}

}  // namespace
}  // namespace lockstep::internal::testing

// Repeated reductions of buckets, and other things that ranks of one host
// share, through tensors and process groups.
#include "lockstep/comm/host_sharing.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/trace/span.h"
#include "tests/comm/contract/tensors.h"
#include "tests/comm/failure_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::real_numbers;
using testing::same_bits;

ProcessGroupGuard init(const std::string& backend = "cpu:lockstep") {
  return init_process_group(backend, {.timeout = seconds(30)});
}

std::vector<ReducedBucket> shared_buckets(const std::vector<int64_t>& counts,
                                          at::ScalarType dtype = at::kFloat) {
  std::vector<ReducedBucket> buckets;
  for (const auto count : counts) {
    buckets.push_back({.flat = empty_shared({count}, dtype)});
  }
  return buckets;
}

at::Tensor numbers(const ReducedBucket& bucket, int rank, int round) {
  return real_numbers(bucket.flat.scalar_type(), {bucket.flat.numel()},
                      100 * round + rank);
}

// Runs one reduction and checks its results against the average by all_reduce.
void run_round(BucketReduction& reduction,
               const std::vector<ReducedBucket>& buckets,
               const testing::World& world, int round, bool by_average) {
  reduction.begin(1, world.size);
  for (size_t i = 0; i < buckets.size(); ++i) {
    buckets[i].flat.copy_(numbers(buckets[i], world.rank, round));
    buckets[i].flat.mul_(reduction.contribution_factor());
    reduction.publish(i);
    EXPECT_LE(reduction.advance(), i + 1);
  }
  reduction.finish();
  EXPECT_EQ(reduction.advance(), buckets.size());
  for (const auto& bucket : buckets) {
    auto expected = numbers(bucket, world.rank, round);
    if (!by_average) expected.mul_(1.0 / world.size);
    all_reduce(expected, {.op = by_average ? ReduceOp::AVG : ReduceOp::SUM});
    EXPECT_TRUE(same_bits(bucket.flat, expected))
        << bucket.flat.toString() << ", round " << round;
  }
}

WORLD_TEST(BucketReductionOverTheHost, GivesTheBitsOfAllReduce, 1, 2, 3, 5) {
  auto group = init();
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
    const auto buckets = shared_buckets({1, 1000, 0, 70'001}, dtype);
    auto reduction =
        make_bucket_reduction(buckets, Results::everywhere, nullptr);
    EXPECT_EQ(host_sharing(nullptr) != nullptr, true);
    for (int round = 0; round < 4; ++round) {
      run_round(*reduction, buckets, world, round, true);
    }
  }
}

WORLD_TEST(BucketReductionByAllReduce, GivesTheBitsOfAllReduce, 1, 2, 3) {
  for (const auto* backend : {"gloo", "cpu:lockstep"}) {
    auto group = init(backend);
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
      std::vector<ReducedBucket> buckets{{.flat = at::empty({3}, dtype)},
                                         {.flat = at::empty({9'000}, dtype)}};
      auto reduction = all_reduce_buckets(buckets, group.get());
      for (int round = 0; round < 3; ++round) {
        run_round(*reduction, buckets, world, round, false);
      }
    }
  }
}

WORLD_TEST(BucketReductionByAllReduce, IsWhatGlooAndOrdinaryMemoryGet, 2, 3) {
  {
    auto group = init("gloo");
    EXPECT_EQ(host_sharing(group.get()), nullptr);
    const auto buckets = shared_buckets({5, 100});
    auto reduction = make_bucket_reduction(buckets, Results::owned, nullptr);
    run_round(*reduction, buckets, world, 0, false);
  }
  auto group = init();
  auto buckets = shared_buckets({5, 100});
  // One rank has a bucket in ordinary memory, as if shared memory were full.
  if (world.rank == 1) buckets[1].flat = at::empty({100});
  EXPECT_EQ(host_sharing(group.get())
                ->reduce_buckets(buckets, Results::owned, nullptr, seconds(30)),
            nullptr);
  auto reduction = make_bucket_reduction(buckets, Results::owned, nullptr);
  run_round(*reduction, buckets, world, 0, false);
}

WORLD_TEST(BucketReductionByAllReduce, LeavesAWorldOfOneAlone, 1) {
  auto group = init();
  const auto buckets = shared_buckets({5});
  auto reduction = make_bucket_reduction(buckets, Results::everywhere, nullptr);
  buckets[0].flat.fill_(3);
  reduction->begin(1, 1);
  EXPECT_EQ(reduction->contribution_factor(), 1);
  reduction->publish(0);
  EXPECT_EQ(reduction->advance(), 1u);
  reduction->finish();
  EXPECT_TRUE(buckets[0].flat.equal(at::full({5}, 3.0f)));
  EXPECT_EQ(inside(group).flight()->last_id(), 0u);
}

WORLD_TEST(BucketReductionOverTheHost, OwnedElementsHoldTheResult, 2, 3) {
  auto group = init();
  auto buckets = shared_buckets({1000, 64});
  // The ranks own 10 elements each in turn; rank 0 owns all of the second
  // bucket.
  for (int64_t begin = 10 * world.rank; begin < 1000;
       begin += 10 * world.size) {
    buckets[0].owned.push_back({begin, std::min<int64_t>(begin + 10, 1000)});
  }
  if (world.rank == 0) buckets[1].owned = {{0, 30}, {30, 64}};
  auto reduction = make_bucket_reduction(buckets, Results::owned, nullptr);
  EXPECT_EQ(reduction->contribution_factor(), 1);
  for (int round = 0; round < 4; ++round) {
    reduction->begin(1, 5);
    for (size_t i = 0; i < 2; ++i) {
      buckets[i].flat.copy_(numbers(buckets[i], world.rank, round));
      reduction->publish(i);
    }
    reduction->finish();
    for (const auto& bucket : buckets) {
      auto expected = numbers(bucket, world.rank, round);
      all_reduce(expected);
      expected.mul_(1 / 5.0);
      for (const auto& [begin, end] : bucket.owned) {
        EXPECT_TRUE(same_bits(bucket.flat.slice(0, begin, end),
                              expected.slice(0, begin, end)));
      }
    }
  }
}

WORLD_TEST(BucketReduction, GoesOnBehindAnAbandonedRound, 2, 3) {
  for (const auto* backend : {"gloo", "cpu:lockstep"}) {
    const bool shared = std::string(backend) != "gloo";
    auto group = init(backend);
    const auto buckets = shared_buckets({5, 20'000, 100});
    auto reduction =
        make_bucket_reduction(buckets, Results::everywhere, nullptr);
    for (int round = 0; round < 5; ++round) {
      reduction->begin(1, world.size);
      for (int i = 0; i < (world.rank + round) % 4; ++i) {
        buckets[i].flat.fill_(77);
        reduction->publish(i);
        reduction->advance();
      }
      run_round(*reduction, buckets, world, round, shared);
    }
  }
}

WORLD_TEST(BucketReductionOverTheHost, GoesOnBesideCollectives, 2) {
  auto group = init();
  const auto buckets = shared_buckets({50'000, 7});
  auto reduction = make_bucket_reduction(buckets, Results::everywhere, nullptr);
  for (int round = 0; round < 20; ++round) {
    auto sum = at::full({10'000}, world.rank + 1.0f);
    auto work = all_reduce(sum, {.async_op = true});
    run_round(*reduction, buckets, world, round, true);
    work->wait();
    EXPECT_TRUE(sum.equal(at::full({10'000}, 3.0f)));
  }
}

WORLD_TEST(BucketReductionOverTheHost, BucketsThatDifferAreNamed, 2, 3) {
  auto group = init();
  const auto buckets = shared_buckets({5, world.rank == 1 ? 11 : 10});
  EXPECT_THAT(failure_of([&] {
                make_bucket_reduction(buckets, Results::everywhere, nullptr);
              }),
              AllOf(HasSubstr("bucket 2 of 2 holds 10 Float"),
                    HasSubstr("rank 1: bucket 2 of 2 holds 11 Float")));
  barrier();
}

WORLD_TEST(BucketReductionOverTheHost, TakesFloatingTensorsOfTheCpu, 1) {
  auto group = init();
  auto& sharing = *host_sharing(nullptr);
  for (const auto& flat :
       {at::Tensor(), at::ones({4}, at::kInt), at::ones({4, 4}).t()}) {
    EXPECT_THROW(sharing.reduce_buckets({{.flat = flat}}, Results::everywhere,
                                        nullptr, seconds(30)),
                 std::invalid_argument);
  }
  EXPECT_THROW(sharing.zeros_in_common(-1, at::kFloat, seconds(30)),
               std::invalid_argument);
}

FlightRecord last_record(const ProcessGroupPtr& group) {
  FlightRecord record{};
  EXPECT_TRUE(
      inside(group).flight()->read(inside(group).flight()->last_id(), record));
  return record;
}

WORLD_TEST(BucketReductionOverTheHost, RoundsAreRecordedAsOneCollective, 2) {
  auto group = init();
  const auto buckets = shared_buckets({5, 100});
  auto reduction = make_bucket_reduction(buckets, Results::everywhere, nullptr);
  barrier();
  reduction->begin(1, 2);
  auto record = last_record(group.get());
  EXPECT_STREQ(record.call.operation, "reduce_buckets");
  EXPECT_STREQ(record.call.dtype, "Float");
  EXPECT_EQ(record.call.number, 3u) << "after its making and the barrier";
  EXPECT_EQ(record.call.in_elements, 105u);
  EXPECT_EQ(record.state, FlightState::started);
  reduction->publish(0);
  reduction->begin(1, 2);  // abandons the first
  EXPECT_TRUE(inside(group).flight()->read(record.id, record));
  EXPECT_EQ(record.state, FlightState::failed);
  reduction->publish(0);
  reduction->publish(1);
  reduction->finish();
  record = last_record(group.get());
  EXPECT_EQ(record.call.number, 4u);
  EXPECT_EQ(record.state, FlightState::completed);
}

// Records each bucket reduction that begins.
class Listener final : public SpanObserver {
 public:
  void on_begin(const SpanBegin& begin) noexcept override {
    if (begin.category != "comm" || begin.name != "reduce_bucket") return;
    std::string text;
    for (const auto& [key, value] : begin.attributes) {
      text += std::string(key) + "=" +
              std::to_string(std::get<int64_t>(value)) + " ";
    }
    std::lock_guard lock(mutex_);
    begun_.push_back(text);
  }
  void on_end(const SpanEnd&) noexcept override {}
  std::vector<std::string> begun() {
    std::lock_guard lock(mutex_);
    return begun_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> begun_;
};

WORLD_TEST(BucketReductionOverTheHost, EachBucketIsASpan, 2) {
  auto group = init();
  const auto buckets = shared_buckets({5, 100});
  auto reduction = make_bucket_reduction(buckets, Results::everywhere, nullptr);
  auto listener = std::make_shared<Listener>();
  {
    const SpanSubscription subscription(listener);
    reduction->begin(1, 2);
    reduction->publish(0);
    reduction->publish(1);
    reduction->finish();
  }
  EXPECT_THAT(listener->begun(),
              ElementsAre("bucket=0 bytes=20 ", "bucket=1 bytes=400 "));
}

WORLD_TEST(BucketReductionOverTheHost, RankThatAbortsIsNamed, 2, 3) {
  auto group = init();
  auto part = new_group();
  const auto buckets = shared_buckets({5});
  std::vector<ReducedBucket> of_part{{.flat = empty_shared({5}, {}, part)}};
  auto reduction = make_bucket_reduction(of_part, Results::everywhere, part);
  reduction->begin(1, world.size);
  if (world.rank == 1) {
    part->abort();
    EXPECT_THAT(failure_of([&] { reduction->begin(1, 1); }),
                HasSubstr("was aborted"));
  } else {
    reduction->publish(0);
    EXPECT_THAT(
        failure_of([&] { reduction->finish(); }),
        AllOf(HasSubstr("reduce_buckets #2 in group"), HasSubstr("rank 1")));
    EXPECT_EQ(last_record(part).state, FlightState::failed);
  }
  barrier();
}

WORLD_TEST(BucketReductionOverTheHost, RankThatDoesNotPublishIsNamed, 2) {
  auto group = init();
  auto part = new_group();
  std::vector<ReducedBucket> buckets{{.flat = empty_shared({5}, {}, part)}};
  auto reduction = host_sharing(part)->reduce_buckets(
      buckets, Results::everywhere, part, seconds(4));
  reduction->begin(1, world.size);
  if (world.rank == 0) {
    reduction->publish(0);
    EXPECT_THAT(
        failure_of([&] { reduction->finish(); }),
        AllOf(
            HasSubstr("rank 1 has not published bucket 1 of 1 of reduction 1"),
            HasSubstr("allowed 4000 ms")));
  }
  barrier();
}

WORLD_TEST(BucketReductionOverTheHost, OutlivesItsGroupToNoPurpose, 2) {
  std::unique_ptr<BucketReduction> reduction;
  {
    auto group = init();
    const auto buckets = shared_buckets({5});
    reduction = make_bucket_reduction(buckets, Results::everywhere, nullptr);
    run_round(*reduction, buckets, world, 0, true);
  }
  EXPECT_THAT(failure_of([&] { reduction->begin(1, 2); }),
              HasSubstr("this rank has left the group"));
}

WORLD_TEST(HostSharing, ZerosInCommonAreOneMemory, 1, 2, 3) {
  at::Tensor tensor;
  {
    auto group = init();
    tensor =
        host_sharing(nullptr)->zeros_in_common(1000, at::kDouble, seconds(30));
    EXPECT_EQ(tensor.scalar_type(), at::kDouble);
    EXPECT_TRUE(is_shared(tensor));
    EXPECT_FALSE(is_shared(at::empty({3})));
    EXPECT_TRUE(tensor.equal(at::zeros({1000}, at::kDouble)));
    barrier();
    tensor[world.rank] = world.rank + 1.0;
    barrier();
    EXPECT_EQ(tensor.sum().item<double>(), world.size * (world.size + 1) / 2.0);
    EXPECT_EQ(host_sharing(nullptr)
                  ->zeros_in_common(0, at::kFloat, seconds(30))
                  .numel(),
              0);
    barrier();
  }
  EXPECT_EQ(tensor.sum().item<double>(), world.size * (world.size + 1) / 2.0);
}

WORLD_TEST(HostSharing, ZerosInCommonOfDifferentSizesAreNamed, 2) {
  auto group = init();
  EXPECT_THAT(failure_of([&] {
                host_sharing(nullptr)->zeros_in_common(10 + world.rank,
                                                       at::kByte, seconds(30));
              }),
              AllOf(HasSubstr("10 elements"), HasSubstr("11 elements")));
  barrier();
}

WORLD_TEST(HostSharing, SplitBarrierWaitsForWhatLiesBeforeArrivals, 1, 2, 3) {
  auto group = init();
  auto& sharing = *host_sharing(nullptr);
  auto barrier = sharing.split_barrier(seconds(30));
  const auto steps =
      sharing.zeros_in_common(2 * world.size, at::kLong, seconds(30));
  auto* of = steps.mutable_data_ptr<int64_t>();
  barrier->wait(seconds(30));
  for (int64_t step = 1; step < 300; ++step) {
    auto* now = of + step % 2 * world.size;
    now[world.rank] = step;
    barrier->arrive();
    barrier->wait(seconds(30));
    for (int peer = 0; peer < world.size; ++peer) ASSERT_EQ(now[peer], step);
  }
}

WORLD_TEST(HostSharing, SplitBarrierNamesWhoDoesNotArrive, 2) {
  auto group = init();
  auto part = new_group();
  auto barrier = host_sharing(part)->split_barrier(seconds(30));
  if (world.rank == 0) {
    barrier->arrive();
    EXPECT_THAT(failure_of([&] { barrier->wait(milliseconds(200)); }),
                HasSubstr("rank 1 has arrived 0 of 1 times"));
  }
  lockstep::barrier();
}

}  // namespace
}  // namespace lockstep::internal

// The contract of asynchronous operations (collective_options.h) and of
// lockstep/comm/collectives.h.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/point_to_point.h"
#include "tests/comm/contract/contract.h"
#include "tests/comm/contract/tensors.h"
#include "tests/comm/failure_of.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// These functions announce an event to the other ranks and wait for one of
// theirs, through keys of the group's store, without the backend.
void tell(const ProcessGroupPtr& group, const std::string& key) {
  inside(group).store()->set(key, std::vector<uint8_t>{1});
}
void await(const ProcessGroupPtr& group, const std::string& key) {
  inside(group).store()->wait({key}, kGroupTimeout);
}
void tell_mine(const ProcessGroupPtr& group, const std::string& key) {
  tell(group, key + std::to_string(group->rank()));
}
void await_all(const ProcessGroupPtr& group, const std::string& key) {
  for (int i = 0; i < group->size(); ++i) await(group, key + std::to_string(i));
}

// 1 + 2 + ... + size.
double triangle(int size) { return size * (size + 1) / 2.0; }

bool is_filled_with(const at::Tensor& tensor, double value) {
  return tensor.eq(value).all().item<bool>();
}

CONTRACT_TEST(Works, SeveralInFlightMayBeWaitedForInAnyOrder, 1, 2, 3, 5, 8) {
  auto group = world.init();
  constexpr int kRounds = 8;
  const double mine = world.rank + 1;
  struct Flight {
    at::Tensor sum, most, from, all;
    std::vector<WorkPtr> works;
  };
  std::vector<Flight> flights;
  for (int i = 0; i < kRounds; ++i) {
    Flight flight{
        .sum = at::full({1000 * i + 1}, mine + i, world.device),
        .most = at::full({3, 7}, mine + i, world.device).t(),
        .from = at::full({5}, mine + i, world.device),
        .all = at::zeros({world.size, 2}, world.device),
        .works = {},
    };
    flight.works = {
        all_reduce(flight.sum, {.async_op = true}),
        all_reduce(flight.most, {.op = ReduceOp::MAX, .async_op = true}),
        broadcast(flight.from, i % world.size, {.async_op = true}),
        all_gather_into_tensor(flight.all,
                               at::full({2}, mine + i, world.device),
                               {.async_op = true}),
    };
    flights.push_back(flight);
  }
  for (int i = kRounds; i-- > 0;) {  // in reverse order
    for (size_t k = 4; k-- > 0;) flights[i].works[k]->wait();
  }
  for (int i = 0; i < kRounds; ++i) {
    const auto& flight = flights[i];
    EXPECT_TRUE(
        is_filled_with(flight.sum, triangle(world.size) + i * world.size));
    EXPECT_TRUE(is_filled_with(flight.most, world.size + i));
    EXPECT_TRUE(is_filled_with(flight.from, i % world.size + 1 + i));
    for (int rank = 0; rank < world.size; ++rank) {
      EXPECT_TRUE(is_filled_with(flight.all[rank], rank + 1 + i));
    }
  }
}

CONTRACT_TEST(Works, ASynchronousOneStandsBehindThoseInFlight, 1, 2, 3) {
  auto group = world.init();
  auto first = at::full({100'000}, world.rank + 1.0, world.device);
  auto second = at::ones({3}, world.device);
  auto work = all_reduce(first, {.async_op = true});
  all_reduce(second);
  EXPECT_TRUE(is_filled_with(second, world.size));
  work->wait();
  EXPECT_TRUE(is_filled_with(first, triangle(world.size)));
}

CONTRACT_TEST(Works, KeepsItsTensorsAlive, 2, 3) {
  auto group = world.init();
  auto all = at::zeros({world.size, 50'000}, world.device);
  std::vector<WorkPtr> works;
  for (int i = 0; i < 4; ++i) {
    // The handles passed here are released before the operation has ended.
    works.push_back(all_gather_into_tensor(
        all, at::full({50'000}, world.rank + 1.0f, world.device),
        {.async_op = true}));
  }
  auto gone = all_reduce(at::ones({50'000}, world.device), {.async_op = true});
  for (auto& work : works) work->wait();
  gone->wait();
  for (int i = 0; i < world.size; ++i)
    EXPECT_TRUE(is_filled_with(all[i], i + 1));
}

CONTRACT_TEST(Works, CanBePolledAndWaitedForTwice, 1, 2, 3) {
  auto group = world.init();
  auto tensor = at::full({4, 6}, world.rank + 1.0, world.device);
  if (world.rank != 0) await(group.get(), "begun");
  auto work = all_reduce(tensor.t(), {.async_op = true});
  if (world.rank == 0) {
    EXPECT_TRUE(world.size == 1 || !work->isCompleted());
    tell(group.get(), "begun");
  }
  const auto deadline = Deadline::after(kGroupTimeout);
  while (!work->isCompleted()) {
    ASSERT_FALSE(deadline.expired());
    std::this_thread::yield();
  }
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_EQ(work->exception(), nullptr);
  EXPECT_TRUE(is_filled_with(tensor, triangle(world.size)));
}

CONTRACT_TEST(Works, GiveFuturesThatHaveTheResult, 1, 2, 3) {
  auto group = world.init();
  auto tensor = at::full({4, 6}, world.rank + 1.0, world.device);
  auto work = all_reduce(tensor.t(), {.async_op = true});
  auto future = work->getFuture();
  auto then = future->then(
      [](c10::ivalue::Future& done) { return c10::IValue(!done.hasError()); },
      c10::BoolType::get());
  future->wait();
  EXPECT_TRUE(future->completed());
  EXPECT_FALSE(future->hasError());
  // No wait() is needed, although the backend does not know these strides.
  EXPECT_TRUE(is_filled_with(tensor, triangle(world.size)));
  then->wait();
  EXPECT_TRUE(then->value().toBool());
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(is_filled_with(tensor, triangle(world.size)));
}

CONTRACT_TEST(Works, AWaitThatTimesOutMayBeRepeated, 2, 3) {
  auto group = world.init();
  auto tensor = at::full({3, 5}, world.rank + 1.0, world.device).t();
  if (world.rank == 0) {
    auto work = all_reduce(tensor, {.async_op = true});
    auto text = failure_of([&] { work->wait(milliseconds(50)); });
    EXPECT_THAT(text, AllOf(HasSubstr("all_reduce"), HasSubstr("default_pg"),
                            HasSubstr("rank 0"), HasSubstr("allowed 50 ms")));
    EXPECT_FALSE(work->isCompleted());
    tell(group.get(), "timed out");
    EXPECT_TRUE(work->wait());
  } else {
    await(group.get(), "timed out");
    all_reduce(tensor);
  }
  EXPECT_TRUE(is_filled_with(tensor, triangle(world.size)));
}

CONTRACT_TEST(Works, ATimeoutNamesOperationNumberGroupRankAndTimes, 2, 3) {
  auto group = world.init();
  barrier();
  if (world.rank == 0) {
    const auto expected =
        AllOf(HasSubstr("all_reduce"), HasSubstr("#2"), HasSubstr("default_pg"),
              HasSubstr("rank 0 of " + std::to_string(world.size)),
              HasSubstr("allowed 200 ms"), Not(HasSubstr("\n")));
    EXPECT_THAT(failure_of([&] {
                  all_reduce(at::ones({4}, world.device),
                             {.timeout = milliseconds(200)});
                }),
                expected);
    tell(group.get(), "timed out");
  } else {
    // The peers have not left, so the error reports lateness.
    await(group.get(), "timed out");
  }
}

CONTRACT_TEST(Works, AnAsynchronousTimeoutComesOutOfWaitAndTheFuture, 2, 3) {
  auto group = world.init();
  barrier();
  if (world.rank == 0) {
    auto work = all_reduce(at::ones({4}, world.device),
                           {.async_op = true, .timeout = milliseconds(200)});
    auto future = work->getFuture();
    EXPECT_THAT(failure_of([&] { work->wait(); }),
                AllOf(HasSubstr("all_reduce"), HasSubstr("#2"),
                      HasSubstr("default_pg"), HasSubstr("allowed 200 ms")));
    EXPECT_THROW(future->waitAndThrow(), std::exception);
    const auto deadline = Deadline::after(kGroupTimeout);
    while (!work->isCompleted()) {
      ASSERT_FALSE(deadline.expired());
      std::this_thread::yield();
    }
    EXPECT_FALSE(work->isSuccess());
    EXPECT_NE(work->exception(), nullptr);
    tell(group.get(), "timed out");
  } else {
    await(group.get(), "timed out");
  }
}

CONTRACT_TEST(Works, APeerThatIsGoneFailsTheOthers, 3) {
  auto group = world.init();
  barrier();
  if (world.rank == 1) {
    group->abort();
    tell(group.get(), "gone");
  } else {
    await(group.get(), "gone");
    auto text = failure_of([&] {
      for (int i = 0; i < 3; ++i) {  // the first messages may be buffered
        all_reduce(at::ones({100'000}, world.device),
                   {.timeout = milliseconds(3000)});
      }
    });
    EXPECT_THAT(text, AllOf(HasSubstr("all_reduce"), HasSubstr("default_pg"),
                            HasSubstr("rank " + std::to_string(world.rank))));
  }
  tell_mine(group.get(), "seen");
  await_all(group.get(), "seen");
}

CONTRACT_TEST(Works, ATensorWrittenInFlightIsToldByWait, 2) {
  auto group = world.init();
  for (int which = 0; which < 2; ++which) {
    auto tensor = at::ones({1000}, world.device);
    auto input = at::ones({1000}, world.device);
    auto output = at::zeros({2, 1000}, world.device);
    auto work = which == 0
                    ? all_reduce(tensor, {.async_op = true})
                    : all_gather_into_tensor(output, input, {.async_op = true});
    if (world.rank == 0) {
      (which == 0 ? tensor : input).add_(1);
      for (int wait = 0; wait < 2; ++wait) {  // the failure stays
        EXPECT_THAT(failure_of([&] { work->wait(); }),
                    AllOf(HasSubstr(which == 0 ? "all_reduce"
                                               : "all_gather_into_tensor"),
                          HasSubstr("modified"), HasSubstr("rank 0 of 2")));
      }
    } else {
      work->wait();
    }
  }
  auto tensor = at::ones({3}, world.device);
  all_reduce(tensor);  // the ranks still make the same calls
  EXPECT_TRUE(is_filled_with(tensor, 2));
  // The tensor may be written after wait().
  auto work = all_reduce(tensor, {.async_op = true});
  work->wait();
  tensor.zero_();
  EXPECT_TRUE(work->wait());
}

// With "mpi", a call that ran out of time while an earlier one was pending left
// the group whole, and the peers' call met this rank's next one: wrong sums.
CONTRACT_TEST(Works, ACallThatRanOutOfTimeBehindAnotherGivesNoWrongSums, 2, 3) {
  auto group = world.init();
  // Expects the sum to be right if the call succeeds, which it returns.
  auto sums = [&](const at::Tensor& tensor, milliseconds timeout) {
    const double value = tensor[0].item<double>();
    try {
      all_reduce(tensor, {.timeout = timeout});
    } catch (const c10::DistBackendError&) {
      return false;
    }
    EXPECT_TRUE(is_filled_with(tensor, value * world.size));
    return true;
  };
  auto first = at::full({4}, 1.0, world.device);
  auto second = at::full({4}, 10.0, world.device);
  auto third = at::full({4}, 100.0, world.device);
  WorkPtr work;
  if (world.rank == 0) {
    work = all_reduce(first, {.async_op = true});
    EXPECT_FALSE(sums(second, milliseconds(300)));
    tell(group.get(), "gave up");
  } else {
    await(group.get(), "gave up");
    try {
      work = all_reduce(first, {.async_op = true});
    } catch (const c10::DistBackendError&) {
      // The group is broken already.
    }
    sums(second, milliseconds(3000));
  }
  try {
    if (work) work->wait();
  } catch (const c10::DistBackendError&) {
  }
  // Gloo may have summed the second call after rank 0 had stopped waiting for
  // it. Then the calls still match, and the third one may succeed.
  sums(third, milliseconds(3000));
  tell_mine(group.get(), "done");
  await_all(group.get(), "done");
}

// A continuation runs on the thread that runs the operations. One that waited
// for an operation which it had started kept that from being run: the wait
// lasted until its deadline.
CONTRACT_TEST(Works, AContinuationMayWaitForAnotherOperation, 1, 2, 3) {
  auto group = world.init({.timeout = std::chrono::seconds(5)});
  auto first = at::full({4}, world.rank + 1.0, world.device);
  auto second = at::full({4}, world.rank + 1.0, world.device);
  auto continued = all_reduce(first, {.async_op = true})
                       ->getFuture()
                       ->then(
                           [&](c10::ivalue::Future&) -> c10::IValue {
                             all_reduce(second, {.async_op = true})->wait();
                             return second;
                           },
                           c10::TensorType::get());
  continued->waitAndThrow();
  EXPECT_TRUE(is_filled_with(second, triangle(world.size)));
  EXPECT_TRUE(is_filled_with(first, triangle(world.size)));
}

// isSuccess() said true and exception() null after the results could not be
// written.
CONTRACT_TEST(Works, ATensorWrittenInFlightIsSeenByPolling, 2) {
  auto group = world.init();
  auto tensor = at::ones({1000}, world.device);
  auto work = all_reduce(tensor, {.async_op = true});
  if (world.rank == 0) tensor.add_(1);
  const auto deadline = Deadline::after(kGroupTimeout);
  while (!work->isCompleted()) {
    ASSERT_FALSE(deadline.expired());
    std::this_thread::yield();
  }
  if (world.rank == 0) {
    EXPECT_FALSE(work->isSuccess());
    ASSERT_NE(work->exception(), nullptr);
    EXPECT_THAT(failure_of([&] { std::rethrow_exception(work->exception()); }),
                AllOf(HasSubstr("all_reduce #1"), HasSubstr("rank 0 of 2"),
                      HasSubstr("modified")));
  } else {
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->exception(), nullptr);
  }
}

CONTRACT_TEST(Barriers, BarrierReturnsWhenAllHaveCalledIt, 1, 2, 3, 5, 8) {
  auto group = world.init();
  for (int round = 0; round < 10; ++round) {
    const int late = round % world.size;
    const auto key = std::to_string(round);
    if (world.rank == late) {
      // Waits until all others are inside theirs.
      for (int i = 0; i < world.size; ++i) {
        if (i != late) await(group.get(), "waits" + key + std::to_string(i));
      }
      tell(group.get(), "late" + key);
      // The store does not confirm a key that is set, and a barrier of
      // microseconds may end before the key is set. The store answers this
      // question only after setting the key.
      inside(group).store()->check({"late" + key});
      barrier();
      continue;
    }
    auto work = round % 2 == 0 ? barrier({.async_op = true}) : nullptr;
    tell_mine(group.get(), "waits" + key);
    if (work) {
      work->wait();
    } else {
      barrier();
    }
    EXPECT_TRUE(inside(group).store()->check({"late" + key}))
        << "in round " << round;
  }
}

CONTRACT_TEST(Barriers, MonitoredBarrierReturnsWhenAllHaveCalledIt, 1, 2, 3, 5,
              8) {
  auto group = world.init();
  for (int round = 0; round < 5; ++round) {
    const int late = round % world.size;
    const auto key = std::to_string(round);
    if (world.rank == late) {
      for (int i = 0; i < world.size; ++i) {
        if (i != late) await(group.get(), "waits" + key + std::to_string(i));
      }
      tell(group.get(), "late" + key);
      monitored_barrier();
    } else {
      tell_mine(group.get(), "waits" + key);
      monitored_barrier();
      EXPECT_TRUE(inside(group).store()->check({"late" + key})) << round;
    }
  }
}

CONTRACT_TEST(Barriers, MonitoredBarrierNamesTheAbsentOnEveryPresentRank, 2, 3,
              5, 8) {
  auto group = world.init();
  // Ranks 1 and 4 stay away.
  const bool absent = world.rank == 1 || world.rank == 4;
  if (!absent) {
    auto text =
        failure_of([] { monitored_barrier({.timeout = milliseconds(500)}); });
    EXPECT_THAT(text,
                AllOf(HasSubstr("monitored_barrier"), HasSubstr("default_pg"),
                      HasSubstr("rank " + std::to_string(world.rank) + " of " +
                                std::to_string(world.size)),
                      HasSubstr("allowed 500 ms"),
                      HasSubstr(world.size > 4 ? "rank 1, 4 did not come"
                                               : "rank 1 did not come")));
    tell_mine(group.get(), "told");
  }
  for (int i = 0; i < world.size; ++i) {
    if (i != 1 && i != 4) await(group.get(), "told" + std::to_string(i));
  }
  // The group still works, and counts its next call correctly.
  auto tensor = at::ones({1}, world.device);
  all_reduce(tensor);
  EXPECT_TRUE(is_filled_with(tensor, world.size));
}

CONTRACT_TEST(Barriers, MonitoredBarrierOfASubgroupNamesRanksOfTheWorld, 5) {
  auto group = world.init();
  auto odd_ones = new_group({1, 3, 4});
  if (world.rank == 1 || world.rank == 4) {
    auto text = failure_of([&] {
      monitored_barrier({.group = odd_ones, .timeout = milliseconds(300)});
    });
    EXPECT_THAT(text, AllOf(HasSubstr("'" + odd_ones->name() + "'"),
                            HasSubstr("rank 3 did not come"),
                            HasSubstr("allowed 300 ms")));
  }
  barrier();
}

}  // namespace
}  // namespace lockstep::internal::testing

#include "lockstep/comm/work_queue.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <pthread.h>
#include <unistd.h>
#include <array>
#include <atomic>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "lockstep/base/interruption.h"
#include "tests/harness/asleep.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using testing::await_asleep;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr milliseconds kLong{20'000};
constexpr milliseconds kShort{30};

// An operation that blocks until the test opens the gate.
class Gate {
 public:
  void open() { opened_.set_value(); }
  void operator()() const {
    entered_->set_value();
    if (wait_.wait_for(kLong) != std::future_status::ready) {
      throw std::runtime_error("the gate was never opened");
    }
  }
  void await_entry() const { entered_->get_future().wait_for(kLong); }

 private:
  std::promise<void> opened_;
  std::shared_future<void> wait_{opened_.get_future().share()};
  std::shared_ptr<std::promise<void>> entered_{
      std::make_shared<std::promise<void>>()};
};

c10::intrusive_ptr<c10d::Work> enqueue(WorkQueue& queue,
                                       std::function<void()> operation,
                                       std::vector<at::Tensor> results = {}) {
  return queue.enqueue(3, c10d::OpType::ALLREDUCE, kLong, std::move(results),
                       std::move(operation));
}

std::exception_ptr as_pointer(const char* text) {
  return std::make_exception_ptr(std::runtime_error(text));
}

template <typename Function>
std::string failure_of(Function&& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(WorkQueue, RunsInTheCallerAndLetsExceptionsThrough) {
  WorkQueue queue("queue");
  std::thread::id where;
  queue.run(kLong, [&] { where = std::this_thread::get_id(); });
  EXPECT_EQ(where, std::this_thread::get_id());
  EXPECT_THROW(queue.run(kLong, [] { throw std::out_of_range("mine"); }),
               std::out_of_range);
  bool ran = false;
  // The exception has given back the turn.
  queue.run(kLong, [&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(WorkQueue, RunsQueuedOperationsOnOneNamedThreadInOrder) {
  WorkQueue queue("lockstep-queue");
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  std::string name;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 4; ++i) {
    works.push_back(enqueue(queue, [&, i] {
      std::array<char, 16> text{};
      ::pthread_getname_np(::pthread_self(), text.data(), text.size());
      name = text.data();
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    }));
  }
  // A wait may run them itself, unless their futures were asked for.
  for (auto& work : works) work->getFuture()->wait();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3));
  for (auto id : threads) {
    EXPECT_EQ(id, threads[0]);
    EXPECT_NE(id, std::this_thread::get_id());
  }
  EXPECT_EQ(name, "lockstep-queue");
}

TEST(WorkQueue, ASynchronousOperationStandsBehindThePendingOnes) {
  WorkQueue queue("queue");
  Gate gate;
  std::vector<int> order;
  auto first = enqueue(queue, [&] {
    gate();
    order.push_back(1);
  });
  auto second = enqueue(queue, [&] { order.push_back(2); });
  gate.await_entry();
  std::thread opener([&, waiting = ::gettid()] {
    EXPECT_TRUE(await_asleep(waiting));
    gate.open();
  });
  queue.run(kLong, [&] { order.push_back(3); });
  opener.join();
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
  EXPECT_TRUE(first->isCompleted() || first->wait(kLong));
  EXPECT_TRUE(second->wait(kLong));
}

TEST(WorkQueue, AQueuedOperationStandsBehindASynchronousOne) {
  WorkQueue queue("queue");
  std::vector<int> order;
  c10::intrusive_ptr<c10d::Work> work;
  queue.run(kLong, [&] {
    std::thread([&] {
      work = enqueue(queue, [&] { order.push_back(2); });
    }).join();
    std::this_thread::sleep_for(kShort);
    order.push_back(1);
  });
  EXPECT_TRUE(work->wait(kLong));
  EXPECT_THAT(order, ElementsAre(1, 2));
}

TEST(WorkQueue, NoTwoOperationsOverlapWhoeverIssuesThem) {
  WorkQueue queue("queue");
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  int total = 0;  // guarded only by the turn
  auto operation = [&] {
    if (inside.fetch_add(1) != 0) overlapped = true;
    ++total;
    inside.fetch_sub(1);
  };
  constexpr int kThreads = 4;
  constexpr int kRounds = 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        queue.run(kLong, operation);
        auto work = enqueue(queue, operation);
        if (i % 3 == 0) work->wait(kLong);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  queue.run(kLong, [] {});  // runs after all others
  EXPECT_FALSE(overlapped);
  EXPECT_EQ(total, 2 * kThreads * kRounds);
}

// A bug: the operation could not know how long it had waited for its turn, and
// took its whole timeout again.
TEST(WorkQueue, ASynchronousOperationIsToldWhatIsLeftOfItsTimeout) {
  WorkQueue queue("queue");
  milliseconds left{0};
  const auto keep = [&](milliseconds given) { left = given; };
  queue.run(kLong, keep);
  EXPECT_EQ(left, kLong);
  Gate gate;
  auto work = enqueue(queue, [&] { gate(); });
  gate.await_entry();
  std::atomic<pid_t> caller{0};
  std::thread waits([&] {
    caller = ::gettid();
    queue.run(kLong, keep);
  });
  // This looks several times at the caller while it stands in line.
  EXPECT_TRUE(await_asleep(caller));
  gate.open();
  waits.join();
  EXPECT_LT(left, kLong);
  EXPECT_GT(left, milliseconds(0));
}

TEST(WorkQueue, ASynchronousOperationThatWaitsTooLongIsNotRun) {
  WorkQueue queue("queue");
  Gate gate;
  auto work = enqueue(queue, [&] { gate(); });
  gate.await_entry();
  bool ran = false;
  EXPECT_THROW(queue.run(kShort, [&] { ran = true; }), c10::DistBackendError);
  EXPECT_THAT(failure_of([&] { queue.run(kShort, [&] { ran = true; }); }),
              HasSubstr("(allowed 30 ms)"));
  gate.open();
  EXPECT_TRUE(work->wait(kLong));
  queue.run(kLong, [] {});
  EXPECT_FALSE(ran);
}

TEST(WorkQueue, AWaitThatTimesOutMayBeRepeated) {
  WorkQueue queue("queue");
  Gate gate;
  auto work = enqueue(queue, [&] { gate(); });
  EXPECT_THROW(work->wait(kShort), c10::DistBackendError);
  EXPECT_THAT(failure_of([&] { work->wait(kShort); }),
              HasSubstr("timed out after"));
  EXPECT_FALSE(work->isCompleted());
  gate.open();
  EXPECT_TRUE(work->wait(kLong));
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_EQ(work->exception(), nullptr);
}

TEST(WorkQueue, AWorkHasTheResultsAndItsPlace) {
  WorkQueue queue("queue");
  auto tensor = at::zeros({2});
  auto work = enqueue(queue, [tensor] { tensor.add_(5); }, {tensor});
  auto future = work->getFuture();
  future->wait();
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(tensor));
  work->synchronize();
  EXPECT_TRUE(work->result().at(0).is_same(tensor));
  EXPECT_EQ(tensor[1].item<float>(), 5);
  EXPECT_EQ(work->retrieveOpType(), c10d::OpType::ALLREDUCE);
  EXPECT_EQ(work->sourceRank(), -1);
}

TEST(WorkQueue, AFailureComesOutOfWaitAndTheFutureAndTheQueueGoesOn) {
  WorkQueue queue("queue");
  auto work = enqueue(queue, [] { throw std::out_of_range("peer 2 left"); });
  EXPECT_THROW(work->wait(kLong), std::out_of_range);
  EXPECT_THROW(work->wait(), std::out_of_range);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  EXPECT_NE(work->exception(), nullptr);
  EXPECT_THAT(failure_of([&] { work->getFuture()->waitAndThrow(); }),
              HasSubstr("peer 2 left"));
  EXPECT_TRUE(enqueue(queue, [] {})->wait(kLong));
}

TEST(WorkQueue, TheErrorOfAnOperationThatIsDueComesBeforeTheWaits) {
  WorkQueue queue("queue");
  auto work = queue.enqueue(0, c10d::OpType::BARRIER, kShort, {}, [] {
    std::this_thread::sleep_for(2 * kShort);
    throw std::runtime_error("rank 1 did not come");
  });
  EXPECT_EQ(failure_of([&] { work->wait(kShort); }), "rank 1 did not come");
}

TEST(WorkQueue, QueuedOperationsRunWithoutAutograd) {
  WorkQueue queue("queue");
  ASSERT_TRUE(c10::GradMode::is_enabled());
  bool enabled = true;
  enqueue(queue, [&] { enabled = c10::GradMode::is_enabled(); })->wait(kLong);
  EXPECT_FALSE(enabled);
}

TEST(WorkQueue, CloseEndsWhatWasNotBegunAndAllThatComes) {
  WorkQueue queue("queue");
  Gate gate;
  auto running = enqueue(queue, [&] { gate(); });
  gate.await_entry();
  bool ran = false;
  auto pending = enqueue(queue, [&] { ran = true; });
  std::promise<std::string> waiting;
  std::atomic<pid_t> waiter{0};
  std::thread caller([&] {
    waiter = ::gettid();
    waiting.set_value(
        failure_of([&] { queue.run(kLong, [&] { ran = true; }); }));
  });
  EXPECT_TRUE(await_asleep(waiter));
  queue.close(as_pointer("the group was aborted"));
  queue.close(as_pointer("a second time"));
  EXPECT_EQ(failure_of([&] { pending->wait(kLong); }), "the group was aborted");
  EXPECT_EQ(waiting.get_future().get(), "the group was aborted");
  caller.join();
  auto later = enqueue(queue, [&] { ran = true; });
  EXPECT_EQ(failure_of([&] { later->wait(kLong); }), "the group was aborted");
  EXPECT_EQ(failure_of([&] { queue.run(kLong, [&] { ran = true; }); }),
            "the group was aborted");
  EXPECT_FALSE(running->isCompleted());
  gate.open();
  EXPECT_TRUE(running->wait(kLong));
  EXPECT_FALSE(ran);
}

TEST(WorkQueue, CloseOfAnIdleQueueEndsAllThatComes) {
  WorkQueue queue("queue");
  queue.run(kLong, [&] { queue.close(as_pointer("over")); });
  EXPECT_EQ(failure_of([&] { queue.run(kLong, [] {}); }), "over");
  WorkQueue other("queue");
  other.close(as_pointer("over"));
  EXPECT_EQ(failure_of([&] { enqueue(other, [] {})->wait(kLong); }), "over");
}

TEST(WorkQueue, DestructionWaitsForWhatIsPending) {
  std::vector<int> order;
  {
    WorkQueue queue("queue");
    for (int i = 0; i < 3; ++i) {
      enqueue(queue, [&, i] {
        std::this_thread::sleep_for(kShort / 3);
        order.push_back(i);
      });
    }
  }
  EXPECT_THAT(order, ElementsAre(0, 1, 2));
}

TEST(WorkQueue, MayBeDestroyedOnItsOwnThreadByTheLastOperation) {
  struct Owner {
    WorkQueue queue{"queue"};
  };
  auto ran = std::make_shared<std::atomic<int>>(0);
  auto owner = std::make_shared<Owner>();
  Gate gate;
  auto first = enqueue(owner->queue, [owner, &gate, ran] {
    gate();
    ++*ran;
  });
  auto second = enqueue(owner->queue, [ran] { ++*ran; });
  owner.reset();
  gate.open();
  EXPECT_TRUE(first->wait(kLong));
  EXPECT_TRUE(second->wait(kLong));
  EXPECT_EQ(*ran, 2);
}

TEST(WorkQueue, ACallbackOfAWorkMayUseTheQueue) {
  WorkQueue queue("queue");
  Gate gate;
  std::vector<int> order;
  auto work = enqueue(queue, [&] {
    gate();
    order.push_back(1);
  });
  work->getFuture()->addCallback([&](c10::ivalue::Future&) {
    queue.run(kLong, [&] { order.push_back(3); });
  });
  auto second = enqueue(queue, [&] { order.push_back(2); });
  gate.open();
  EXPECT_TRUE(second->wait(kLong));
  queue.run(kLong, [&] { order.push_back(4); });
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4));
}

// A future's wait() does not tell the queue, whose only thread was in the
// callback, so it never returned. PyTorch's PowerSGD hook waits so.
TEST(WorkQueue, ACallbackMayWaitForTheFutureOfAnOperationThatItQueued) {
  WorkQueue queue("queue");
  Gate gate;
  auto first = enqueue(queue, std::ref(gate));
  int deepest = 0;
  std::promise<void> done;
  // Callbacks of operations that callbacks have queued wait, too.
  std::function<void(int)> queue_and_wait = [&](int depth) {
    auto next = enqueue(queue, [&deepest, depth] { deepest = depth; });
    auto future = next->getFuture();
    if (depth < 3) {
      future = future->then(
          [&, depth](c10::ivalue::Future&) {
            queue_and_wait(depth + 1);
            return c10::IValue(depth);
          },
          c10::IntType::get());
    }
    future->wait();
  };
  first->getFuture()->addCallback([&](c10::ivalue::Future&) {
    queue_and_wait(1);
    done.set_value();
  });
  gate.open();
  ASSERT_EQ(done.get_future().wait_for(kLong), std::future_status::ready);
  EXPECT_EQ(deepest, 3);
  // A synchronous operation stands in the same line.
  queue.run(kLong, [&] { deepest = 0; });
  EXPECT_EQ(deepest, 0);
}

// The callback blocked the only thread that could run the operation.
TEST(WorkQueue, ACallbackMayWaitForAnOperationThatItQueued) {
  WorkQueue queue("queue");
  Gate gate;
  std::vector<int> order;
  auto work = enqueue(queue, [&] {
    gate();
    order.push_back(1);
  });
  std::string failure;
  std::promise<void> done;
  work->getFuture()->addCallback([&](c10::ivalue::Future&) {
    auto last = enqueue(queue, [&] { order.push_back(3); });
    failure = failure_of([&] { last->wait(milliseconds(5000)); });
    order.push_back(4);
    done.set_value();
  });
  auto second = enqueue(queue, [&] { order.push_back(2); });
  gate.open();
  EXPECT_TRUE(second->wait(kLong));
  EXPECT_EQ(done.get_future().wait_for(kLong), std::future_status::ready);
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(failure, "nothing was thrown");
}

TEST(WorkQueue, ACallbackThatWaitsIsToldThatTheQueueWasClosed) {
  WorkQueue queue("queue");
  Gate first_gate;
  Gate second_gate;
  auto work = enqueue(queue, [&] { first_gate(); });
  std::atomic<pid_t> waiter{0};
  std::promise<std::string> failure;
  work->getFuture()->addCallback([&](c10::ivalue::Future&) {
    second_gate.await_entry();
    auto last = enqueue(queue, [] {});
    waiter = ::gettid();
    failure.set_value(failure_of([&] { last->wait(); }));
  });
  std::thread caller([&] { queue.run(kLong, [&] { second_gate(); }); });
  first_gate.open();
  EXPECT_TRUE(await_asleep(waiter));
  queue.close(as_pointer("the group was aborted"));
  EXPECT_EQ(failure.get_future().get(), "the group was aborted");
  second_gate.open();
  caller.join();
}

// Continuations ran before the peers were told, and they may take long.
TEST(WorkQueue, CloseMayTellOthersBeforeItEndsWhatIsPending) {
  WorkQueue queue("queue");
  Gate gate;
  auto running = enqueue(queue, [&] { gate(); });
  auto pending = enqueue(queue, [] {});
  gate.await_entry();
  std::vector<int> order;
  pending->getFuture()->addCallback(
      [&](c10::ivalue::Future&) { order.push_back(2); });
  queue.close(as_pointer("over"), [&] { order.push_back(1); });
  EXPECT_THAT(order, ElementsAre(1, 2));
  gate.open();
  EXPECT_TRUE(running->wait(kLong));
}

// Ends the waits of the thread that made it while it lives.
class Interruption {
 public:
  Interruption() {
    interrupted = std::this_thread::get_id();
    set_interruption_check([] {
      if (std::this_thread::get_id() == interrupted) {
        throw std::runtime_error("interrupted");
      }
    });
  }
  ~Interruption() { set_interruption_check(nullptr); }

 private:
  static std::thread::id interrupted;
};
std::thread::id Interruption::interrupted;

TEST(WorkQueue, AWaitCanBeInterruptedAndRepeated) {
  WorkQueue queue("queue");
  Gate gate;
  auto work = enqueue(queue, std::ref(gate));
  gate.await_entry();
  {
    const Interruption interruption;
    EXPECT_EQ(failure_of([&] { work->wait(kLong); }), "interrupted");
    EXPECT_EQ(failure_of([&] { work->wait(::kNoTimeout); }), "interrupted");
  }
  gate.open();
  EXPECT_TRUE(work->wait(kLong));
}

TEST(WorkQueue, ASynchronousOperationThatIsInterruptedIsNotRun) {
  WorkQueue queue("queue");
  Gate gate;
  auto pending = enqueue(queue, std::ref(gate));
  gate.await_entry();
  bool ran = false;
  {
    const Interruption interruption;
    EXPECT_EQ(failure_of([&] { queue.run(kLong, [&] { ran = true; }); }),
              "interrupted");
  }
  gate.open();
  pending->wait(kLong);
  // The queue goes on without it.
  int after = 0;
  queue.run(kLong, [&] { after = 1; });
  EXPECT_EQ(after, 1);
  EXPECT_FALSE(ran);
}

// Keeps a queue's thread in a callback, so that it begins no operation.
class BusyThread {
 public:
  explicit BusyThread(WorkQueue& queue, std::function<void()> then = [] {}) {
    Gate begin;
    auto work = enqueue(queue, std::ref(begin));
    work->getFuture()->addCallback(
        [this, then = std::move(then)](c10::ivalue::Future&) {
          thread_ = ::gettid();
          gate_();
          then();
          ended_.set_value();
        });
    begin.open();
    gate_.await_entry();
  }
  void release() { gate_.open(); }
  bool await_end() {
    return ended_.get_future().wait_for(kLong) == std::future_status::ready;
  }
  const std::atomic<pid_t>& thread() const { return thread_; }

 private:
  Gate gate_;
  std::atomic<pid_t> thread_{0};
  std::promise<void> ended_;
};

TEST(WorkQueue, AWaitRunsWhatNoThreadHasBegunInOrder) {
  WorkQueue queue("queue");
  BusyThread busy(queue);
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 3; ++i) {
    works.push_back(enqueue(queue, [&, i] {
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    }));
  }
  EXPECT_TRUE(works[1]->wait());
  EXPECT_THAT(order, ElementsAre(0, 1));
  EXPECT_TRUE(works[0]->isCompleted());
  EXPECT_FALSE(works[2]->isCompleted());
  EXPECT_TRUE(works[2]->wait(kLong));
  EXPECT_THAT(order, ElementsAre(0, 1, 2));
  for (auto id : threads) EXPECT_EQ(id, std::this_thread::get_id());
  queue.run(kLong, [&] { order.push_back(3); });
  EXPECT_EQ(order.back(), 3);
  busy.release();
  EXPECT_TRUE(busy.await_end());
}

TEST(WorkQueue, WhatFailsInAWaitComesOutOfItAndTheQueueGoesOn) {
  WorkQueue queue("queue");
  BusyThread busy(queue);
  auto work = enqueue(queue, [] { throw std::out_of_range("peer 2 left"); });
  EXPECT_THROW(work->wait(), std::out_of_range);
  EXPECT_THROW(work->wait(), std::out_of_range);
  EXPECT_TRUE(enqueue(queue, [] {})->wait());
  busy.release();
  EXPECT_TRUE(busy.await_end());
}

TEST(WorkQueue, AWaitThatMayEndBeforeTheOperationDoesNotRunIt) {
  WorkQueue queue("queue");
  BusyThread busy(queue);
  std::thread::id where;
  auto work = enqueue(queue, [&] { where = std::this_thread::get_id(); });
  EXPECT_THAT(failure_of([&] { work->wait(kShort); }),
              HasSubstr("timed out after"));
  EXPECT_FALSE(work->isCompleted());
  busy.release();
  EXPECT_TRUE(busy.await_end());
  work->getFuture()->wait();
  EXPECT_NE(where, std::this_thread::get_id());
}

// A callback may need a lock that the thread which waits holds.
TEST(WorkQueue, AWaitDoesNotRunCallbacksOfTheUser) {
  WorkQueue queue("queue");
  BusyThread busy(queue);
  std::thread::id where;
  auto work = enqueue(queue, [] {});
  auto future = work->getFuture()->then(
      [&](c10::ivalue::Future&) {
        where = std::this_thread::get_id();
        return c10::IValue(0);
      },
      c10::IntType::get());
  std::thread releaser([&, waiting = ::gettid()] {
    EXPECT_TRUE(await_asleep(waiting));
    busy.release();
  });
  EXPECT_TRUE(work->wait(kLong));
  future->wait();
  EXPECT_NE(where, std::this_thread::get_id());
  releaser.join();
  EXPECT_TRUE(busy.await_end());
}

TEST(WorkQueue, DestructionWaitsForAnOperationThatRunsInAWait) {
  auto queue = std::make_unique<WorkQueue>("queue");
  BusyThread busy(*queue);
  Gate gate;
  std::atomic<bool> ended{false};
  auto work = enqueue(*queue, [&] {
    gate();
    ended = true;
  });
  std::thread waiter([&] { EXPECT_TRUE(work->wait()); });
  gate.await_entry();
  busy.release();
  EXPECT_TRUE(busy.await_end());
  std::atomic<pid_t> destroyer{0};
  std::thread destroying([&] {
    destroyer = ::gettid();
    queue.reset();
    EXPECT_TRUE(ended);
  });
  EXPECT_TRUE(await_asleep(destroyer));
  gate.open();
  destroying.join();
  waiter.join();
}

TEST(WorkQueue, ACallbackMayWaitForWhatAnotherThreadRunsInItsWait) {
  WorkQueue queue("queue");
  c10::intrusive_ptr<c10d::Work> work;
  BusyThread busy(queue, [&] { EXPECT_TRUE(work->wait(kLong)); });
  Gate gate;
  work = enqueue(queue, std::ref(gate));
  std::thread waiter([&] { EXPECT_TRUE(work->wait()); });
  gate.await_entry();
  busy.release();
  EXPECT_TRUE(await_asleep(busy.thread()));
  gate.open();
  EXPECT_TRUE(busy.await_end());
  waiter.join();
}

TEST(WorkQueue, WhatIsCalledAtTheEndIsToldOfTheFailure) {
  WorkQueue queue("queue");
  BusyThread busy(queue);
  std::vector<bool> told;
  const auto tell = [&](bool failed) { told.push_back(failed); };
  auto good = queue.enqueue(0, c10d::OpType::BARRIER, kLong, {}, [] {});
  good->at_end(tell);
  // It does not keep a wait from running the operation.
  EXPECT_TRUE(good->wait());
  auto bad = queue.enqueue(0, c10d::OpType::BARRIER, kLong, {},
                           [] { throw std::runtime_error("failed"); });
  EXPECT_THROW(bad->wait(), std::runtime_error);
  bad->at_end(tell);  // has ended already
  EXPECT_THAT(told, ElementsAre(false, true));
  busy.release();
  EXPECT_TRUE(busy.await_end());
}

TEST(WorkQueue, TheCompletedWorkHasEndedWell) {
  const auto& work = completed_work();
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(work->wait(kShort));
  EXPECT_EQ(work->exception(), nullptr);
  EXPECT_TRUE(work->result().empty());
  EXPECT_EQ(completed_work().get(), work.get());
}

}  // namespace
}  // namespace lockstep::internal

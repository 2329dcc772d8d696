// Ranks in calls that need each other: one rank is in backward, another in a
// call that the first one will not make. All ranks must fail soon, whatever the
// timeout, and name each rank's call in the user's words and its number in the
// flight record. Calls that only look like that must not fail.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/point_to_point.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/nn/sync_batch_norm.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/comm/failure_of.h"
#include "tests/harness/asleep.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Far beyond the deadline of a case, so an error that comes only at the timeout
// fails the test.
constexpr seconds kTimeout{600};
// Longer than a standstill can stay unnoticed.
constexpr milliseconds kLong{1500};

using Model = DistributedDataParallel<torch::nn::Linear>;

struct Training {
  Model model{torch::nn::Linear(4, 3)};

  at::Tensor loss() { return model(torch::ones({2, 4})).sum(); }
  void backward() { loss().backward(); }
};

std::string number() {
  return "#" + std::to_string(inside(default_group()).flight()->last_number());
}

std::string pid_key(int rank) { return "pid" + std::to_string(rank); }

// Makes this rank late: returns when the other ranks, which are in the call
// that needs this one, have slept so long there that they could be taken for
// ranks that wait in vain.
void come_late(const World& world) {
  for (int rank = 0; rank < world.size; ++rank) {
    if (rank == world.rank) continue;
    const auto pid = inside(default_group()).store()->get_to_str(pid_key(rank));
    ASSERT_TRUE(await_asleep(std::stoi(pid)));
  }
  std::this_thread::sleep_for(kLong);
}

// A program that has lost its group ends with an exception, so no rank waits
// for another.
struct GroupLost {};

void in_group(const std::string& backend,
              const InitProcessGroupOptions& options,
              const std::function<void()>& body) {
  try {
    auto group = init_process_group(backend, options);
    inside(group).store()->set(pid_key(group->rank()),
                               std::to_string(::getpid()));
    body();
    throw GroupLost{};
  } catch (const GroupLost&) {
  }
}

// Returns when all ranks have come here. With Gloo the store ends with rank 0,
// while others may still be reading there why they failed.
void await_all_told(const World& world) {
  static int number = 0;  // equal on all ranks
  const std::string name = "told" + std::to_string(++number) + "-";
  std::ofstream(world.folder / (name + std::to_string(world.rank))) << "now\n";
  const auto deadline = Deadline::after(seconds(20));
  for (int rank = 0; rank < world.size; ++rank) {
    const auto file = world.folder / (name + std::to_string(rank));
    while (!std::filesystem::exists(file) && !deadline.expired()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
}

// After an iteration that went well, rank 0 calls `call` and the others
// backward. The error on every rank must name both calls in the user's words.
void expect_told(const World& world, const std::function<void(Training&)>& call,
                 const std::string& words,
                 const std::string& backend = "cpu:shm",
                 bool check_calls = false) {
  in_group(backend, {.timeout = kTimeout, .check_calls = check_calls}, [&] {
    Training training;
    training.backward();
    auto loss = training.loss();
    const auto text = failure_of([&] {
      if (world.rank == 0) {
        call(training);
      } else {
        loss.backward();
      }
    });
    await_all_told(world);
    EXPECT_THAT(text, AllOf(HasSubstr(words), HasSubstr("backward()")));
    EXPECT_THAT(text, HasSubstr("rank 0"));
    EXPECT_THAT(text, HasSubstr("rank 1"));
    if (words.find('#') != words.npos) {
      EXPECT_THAT(text, HasSubstr(number())) << "not the flight record's";
    }
  });
}

#define UNMATCHED(name, call, words)                                       \
  WORLD_TEST(UnmatchedCalls, BackwardAgainst##name, 2, 3) {                \
    expect_told(                                                           \
        world, [&]([[maybe_unused]] Training& training) { call; }, words); \
  }

UNMATCHED(Barrier, barrier(), "rank 0 in barrier #")
UNMATCHED(AllReduce, all_reduce(at::ones({3})), "rank 0 in all_reduce #")
UNMATCHED(LargeAllReduce, all_reduce(at::ones({300'000})),
          "rank 0 in all_reduce #")
UNMATCHED(AnAsynchronousAllReduce,
          all_reduce(at::ones({3}), {.async_op = true})->wait(),
          "rank 0 in all_reduce #")
UNMATCHED(ACallAfterAnAsynchronousOne,
          (all_reduce(at::ones({3}), {.async_op = true}), barrier()),
          "rank 0 in all_reduce #")
UNMATCHED(BroadcastObject, broadcast_object(1, 0),
          "rank 0 in broadcast_object(), at broadcast #")
UNMATCHED(SaveSnapshot,
          save_snapshot(world.folder / "a.pt",
                        {.model = training.model.module()}),
          "rank 0 in save_snapshot(), at all_reduce #")
UNMATCHED(AForwardAfterOneRankHasFrozen,
          (training.model->parameters()[0].requires_grad_(false),
           training.loss()),
          "rank 0 in forward() after requires_grad or dtype changed, at ")
WORLD_TEST(UnmatchedCalls, BackwardAgainstThatOfAnotherWrapper, 2, 3) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training one;
    DistributedDataParallel<torch::nn::Linear> other(torch::nn::Linear(4, 7));
    auto losses =
        std::vector<at::Tensor>{one.loss(), other(torch::ones({2, 4})).sum()};
    const auto text = failure_of([&] { losses[world.rank == 0].backward(); });
    EXPECT_THAT(
        text, AllOf(HasSubstr("rank 0 in backward(), at reduce_buckets "
                              "#"),
                    HasSubstr("of 35 elements"), HasSubstr("of 15 elements")));
  });
}

WORLD_TEST(UnmatchedCalls, BackwardAgainstAStepOfShardedOptimizers, 2) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training training;
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
        training.model->parameters(), torch::optim::SGDOptions(0.1));
    training.backward();
    auto loss = training.loss();
    const auto text = failure_of([&] {
      if (world.rank == 0) {
        optimizer.step();
      } else {
        loss.backward();
      }
    });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 in "
                                      "ZeroRedundancyOptimizer::step(), at "),
                            HasSubstr("rank 1 in backward(), at "
                                      "reduce_buckets #")));
  });
}

// Rank 0 has one batch less and has left its loop.
WORLD_TEST(UnmatchedCalls, BackwardAgainstTheEndOfTheGroup, 2) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training training;
    training.backward();
    if (world.rank == 0) {
      destroy_process_group();
      return;
    }
    EXPECT_THAT(failure_of([&] { training.backward(); }),
                HasSubstr("rank 0 has left the group"));
  });
}

// If each call is compared through the store, backward is, too.
WORLD_TEST(UnmatchedCalls, OnGlooWithDetail, 2) {
  expect_told(
      world, [](Training&) { barrier(); }, "rank 0: barrier #", "gloo", true);
  expect_told(
      world,
      [&](Training& training) {
        save_snapshot(world.folder / "a.pt",
                      {.model = training.model.module()});
      },
      "rank 0: save_snapshot(), at all_reduce #", "gloo", true);
}

// The ranks are late, but none of them stands still.
WORLD_TEST(UnmatchedCalls, ARankThatComputesIsWaitedFor, 2) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training training;
    for (int late = 0; late < 2; ++late) {
      auto loss = training.loss();
      if (world.rank == late) come_late(world);
      loss.backward();
      if (world.rank != late) come_late(world);
      barrier();
    }
  });
}

WORLD_TEST(UnmatchedCalls, AsynchronousCollectivesRunBesideBackward, 2) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training training;
    for (int late = 0; late < 2; ++late) {
      auto loss = training.loss();
      auto tensor = at::ones({3});
      WorkPtr work;
      // One rank has started the collective and is in backward; the other comes
      // late to both, in the other order.
      if (world.rank == late) {
        come_late(world);
        loss.backward();
        work = all_reduce(tensor, {.async_op = true});
      } else {
        work = all_reduce(tensor, {.async_op = true});
        loss.backward();
      }
      work->wait();
      EXPECT_EQ(tensor[0].item<int>(), 2);
    }
  });
}

WORLD_TEST(UnmatchedCalls, AnotherThreadMayMakeTheCollectives, 2) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training training;
    std::optional<std::thread> other;
    auto tensor = at::ones({3});
    // The thread has used the group before, as the header requires.
    std::thread([] { barrier(); }).join();
    for (int late = 0; late < 2; ++late) {
      auto loss = training.loss();
      if (world.rank == late) {
        all_reduce(tensor);
        loss.backward();
      } else {
        other.emplace([&] {
          come_late(world);
          all_reduce(tensor);
        });
        loss.backward();
        other->join();
      }
    }
    EXPECT_EQ(tensor[0].item<int>(), 4);
  });
}

struct NormalizedImpl : torch::nn::Module {
  NormalizedImpl() {
    register_module("linear", linear);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)).square(); }
  torch::nn::Linear linear{4, 3};
  nn::SyncBatchNorm1d norm{3};
};
TORCH_MODULE(Normalized);

WORLD_TEST(UnmatchedCalls, CollectivesInsideOfBackwardGoOn, 2) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    DistributedDataParallel<Normalized> model{Normalized()};
    for (int step = 0; step < 2; ++step) {
      auto loss = model(torch::randn({4, 4})).sum();
      if (world.rank == step) come_late(world);
      loss.backward();
    }
  });
}

// Rank 1 is stopped in a wait that it has announced. The others need nothing
// more from it there, so they continue, and wait for it in the next call.
WORLD_TEST(UnmatchedCalls, ARankThatIsStoppedAndContinuedIsWaitedFor, 2, 3) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training training;
    auto pid = at::full({1}, ::getpid(), at::kInt);
    broadcast(pid, 1);
    auto loss = training.loss();
    std::optional<std::thread> waker;
    if (world.rank == 0) {
      come_late(world);
      ::kill(pid.item<int>(), SIGSTOP);
      waker.emplace([&] {
        std::this_thread::sleep_for(kLong);
        ::kill(pid.item<int>(), SIGCONT);
      });
    }
    loss.backward();
    barrier();
    if (waker) waker->join();
  });
}

// The sender is a thread that has not used the group before.
WORLD_TEST(UnmatchedCalls, AMessageMayComeFromAnotherThread, 2) {
  in_group("cpu:shm", {.timeout = kTimeout}, [&] {
    Training training;
    auto loss = training.loss();
    auto tensor = at::full({3}, world.rank);
    std::optional<std::thread> sender;
    if (world.rank == 0) {
      sender.emplace([&] {
        come_late(world);
        send(tensor, 1);
      });
    } else {
      recv(tensor, 0);
      EXPECT_EQ(tensor[0].item<int>(), 0);
    }
    loss.backward();
    if (sender) sender->join();
  });
}

}  // namespace
}  // namespace lockstep::internal::testing

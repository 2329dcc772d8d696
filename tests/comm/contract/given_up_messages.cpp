// The tensor of a message that timed out belongs to its caller again
// (lockstep/comm/point_to_point.h).

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/point_to_point.h"
#include "tests/comm/contract/contract.h"
#include "tests/comm/failure_of.h"
#include "tests/comm/store_signs.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr milliseconds kShort{200};
// The first is a size that every backend buffers, the second one that no
// backend can.
constexpr int64_t kSizes[] = {3, int64_t{2} << 20};
constexpr float kSent = 1;
constexpr float kRefilled = 7;

at::Tensor filled(int64_t count, float value) {
  return at::full({count}, value);
}

bool all_are(const at::Tensor& tensor, float value) {
  return tensor.eq(value).all().item<bool>();
}

// Runs `body` for each size, with a blocking and with an asynchronous
// operation. Each run has a group of its own, because a timeout ends a group of
// Gloo.
void in_groups_of_their_own(
    const ContractWorld& world,
    const std::function<void(const ProcessGroupPtr&, int64_t count,
                             bool async_op)>& body) {
  // NCCL alone decides what a wait on a GPU's stream does at its timeout.
  if (world.device.is_cuda()) return;
  auto group = world.init();
  for (const int64_t count : kSizes) {
    for (const bool async_op : {false, true}) {
      SCOPED_TRACE(::testing::Message()
                   << count << (async_op ? " async" : " blocking"));
      const auto own = new_group();
      body(own, count, async_op);
      // No rank leaves before all have looked.
      const std::string key = c10::str("seen ", count, async_op, " ");
      tell(own, key + std::to_string(world.rank));
      for (int rank = 0; rank < world.size; ++rank) {
        await(own, key + std::to_string(rank));
      }
    }
  }
}

// Regression: the data of a message that came late was written into the tensor.
CONTRACT_TEST(GivenUpMessages, AReceiveLeavesTheTensorToItsCaller, 2) {
  in_groups_of_their_own(world, [&](const ProcessGroupPtr& group, int64_t count,
                                    bool async_op) {
    auto given_up = filled(count, 0);
    const PointToPointOptions options{.group = group, .tag = 3};
    if (world.rank == 0) {
      WorkPtr work;
      if (async_op) {
        work = irecv(given_up, 1, options);
        EXPECT_THAT(failure_of([&] { work->wait(kShort); }),
                    HasSubstr("irecv from rank 1"));
      } else {
        auto hurried = options;
        hurried.timeout = kShort;
        EXPECT_THAT(failure_of([&] { recv(given_up, 1, hurried); }),
                    HasSubstr("recv from rank 1"));
      }
      given_up.fill_(kRefilled);
      tell(group, "given up");
      await(group, "sent");
      try {
        auto next = filled(count, 0);
        recv(next, 1, options);
        EXPECT_TRUE(all_are(next, kSent));
      } catch (const c10::DistBackendError&) {
        EXPECT_THAT(world.backend, ::testing::AnyOf("gloo", "cpu:lockstep"));
      }
      EXPECT_TRUE(all_are(given_up, kRefilled));
      if (work) {
        // The operation stays failed.
        EXPECT_THAT(failure_of([&] { work->wait(); }), HasSubstr("irecv"));
        EXPECT_TRUE(all_are(given_up, kRefilled));
      }
    } else {
      await(group, "given up");
      WorkPtr sending;
      try {
        sending = isend(filled(count, kSent), 0, options);
      } catch (const c10::DistBackendError&) {
      }
      tell(group, "sent");
      try {
        if (sending) sending->wait();
      } catch (const c10::DistBackendError&) {
        EXPECT_THAT(world.backend, ::testing::AnyOf("gloo", "cpu:lockstep"));
      }
    }
  });
}

// Regression: the receiver got what the sender wrote into its tensor after
// giving up.
CONTRACT_TEST(GivenUpMessages, ASendLeavesTheTensorToItsCaller, 2) {
  in_groups_of_their_own(world, [&](const ProcessGroupPtr& group, int64_t count,
                                    bool async_op) {
    const PointToPointOptions options{.group = group, .tag = 3};
    auto hurried = options;
    hurried.timeout = kShort;
    if (world.rank == 0) {
      auto given_up = filled(count, kSent);
      WorkPtr work;
      std::string failure;
      try {
        if (async_op) {
          work = isend(given_up, 1, options);
          work->wait(kShort);
        } else {
          send(given_up, 1, hurried);
        }
      } catch (const c10::DistBackendError& error) {
        failure = error.what_without_backtrace();
        EXPECT_THAT(failure, HasSubstr("send to rank 1"));
      }
      EXPECT_TRUE(count == kSizes[0] || !failure.empty());
      given_up.fill_(kRefilled);
      tell(group, failure.empty() ? "taken" : "given up");
      tell(group, "done");
      try {
        send(filled(count, kSent + 1), 1, options);
      } catch (const c10::DistBackendError&) {
        EXPECT_THAT(world.backend, ::testing::AnyOf("gloo", "cpu:lockstep"));
      }
    } else {
      await(group, "done");
      auto tensor = filled(count, 0);
      try {
        recv(tensor, 0, options);
        // "shm" fails the receive; MPI may still deliver what was sent.
        EXPECT_TRUE(inside(group).store()->check({"taken"}) ||
                    world.backend == "mpi");
        EXPECT_TRUE(all_are(tensor, kSent));
      } catch (const c10::DistBackendError& error) {
        EXPECT_TRUE(inside(group).store()->check({"given up"}));
        EXPECT_NE(world.backend, "mpi");
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr("rank 0"));
      }
      try {
        recv(tensor, 0, options);
        EXPECT_TRUE(all_are(tensor, kSent + 1));
      } catch (const c10::DistBackendError&) {
        EXPECT_THAT(world.backend, ::testing::AnyOf("gloo", "cpu:lockstep"));
      }
    }
  });
}

// Regression: the aborted receive still took the message and wrote the tensor.
CONTRACT_TEST(GivenUpMessages, AnAbortedReceiveLeavesItsMessageToTheNext, 2) {
  // Gloo's abort ends only waits.
  if (world.device.is_cuda() || world.backend == "gloo") return;
  auto group = world.init();
  for (const int64_t count : kSizes) {
    if (world.rank == 0) {
      auto aborted = filled(count, 0);
      auto work = irecv(aborted, 1);
      work->abort();
      aborted.fill_(kRefilled);
      EXPECT_THAT(failure_of([&] { work->wait(); }), HasSubstr("aborted"));
      tell(group.get(), c10::str("aborted ", count));
      auto next = filled(count, 0);
      recv(next, 1);
      EXPECT_TRUE(all_are(next, kSent));
      EXPECT_TRUE(all_are(aborted, kRefilled));
    } else {
      await(group.get(), c10::str("aborted ", count));
      send(filled(count, kSent), 0);
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing

// Messages that "shm" gives up: whose tensor it is afterwards, what the
// other end sees, and that later messages arrive correctly.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/point_to_point.h"
#include "tests/comm/failure_of.h"
#include "tests/comm/shm/init_shm.h"
#include "tests/comm/store_signs.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using testing::await;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::init_shm;
using testing::tell;

constexpr int64_t kMany = 2 << 20;  // floats: far more than a ring holds

// Waits until the file exists, with its content.
void await_sign(const std::filesystem::path& path) {
  const auto deadline = Deadline::after(seconds(30));
  std::error_code none;
  while (std::filesystem::file_size(path, none) + 1 <= 1) {
    ASSERT_FALSE(deadline.expired()) << path;
    std::this_thread::sleep_for(milliseconds(2));
  }
}

bool all_are(const at::Tensor& tensor, float value) {
  return tensor.eq(value).all().item<bool>();
}

// Waits until /proc/PID/stat shows that the process is stopped.
void await_stopped(pid_t process) {
  const auto deadline = Deadline::after(seconds(30));
  while (!deadline.expired()) {
    std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
    std::string text;
    std::getline(stat, text);
    const auto state = text.rfind(')');
    if (state != std::string::npos && text.substr(state + 2, 1) == "T") return;
    std::this_thread::sleep_for(milliseconds(2));
  }
  FAIL() << "process " << process << " did not stop";
}

// Regression: the rest of the message was written into the tensor, which
// belonged to the caller again.
WORLD_TEST(ShmGivenUpMessages, AReceiveInTheMiddleLeavesItsMessageToTheNext,
           2) {
  for (const bool async_op : {false, true}) {
    const auto sign = world.folder / (async_op ? "sent async" : "sent");
    auto group = init_shm();
    // Rank 1 may need the store, which rank 0 serves, until here.
    barrier();
    if (world.rank == 0) {
      auto work = isend(at::full({kMany}, 3.0f), 1);
      std::ofstream(sign) << ::getpid() << std::flush;
      // All threads of this process stop here, with the ring full; also the
      // server of the store.
      ::raise(SIGSTOP);
      EXPECT_TRUE(work->wait());
    } else {
      await_sign(sign);
      pid_t process = 0;
      std::ifstream(sign) >> process;
      await_stopped(process);
      auto given_up = at::zeros({kMany});
      if (async_op) {
        auto work = irecv(given_up, 0);
        EXPECT_THAT(failure_of([&] { work->wait(milliseconds(200)); }),
                    HasSubstr("irecv from rank 0"));
        EXPECT_TRUE(work->isCompleted());
        EXPECT_FALSE(work->isSuccess());
      } else {
        failure_of([&] { recv(given_up, 0, {.timeout = milliseconds(200)}); });
      }
      given_up.fill_(7);
      ::kill(process, SIGCONT);
      auto tensor = at::zeros({kMany});
      recv(tensor, 0);
      EXPECT_TRUE(all_are(tensor, 3));
      EXPECT_TRUE(all_are(given_up, 7));
    }
    barrier();
  }
}

// Regression: the receiver got what the sender wrote into its tensor after
// giving up.
WORLD_TEST(ShmGivenUpMessages, ASendInTheMiddleFailsItsReceiveByName, 2) {
  auto group = init_shm();
  if (world.rank == 0) {
    auto given_up = at::full({kMany}, 3.0f);
    EXPECT_THAT(
        failure_of([&] { send(given_up, 1, {.timeout = milliseconds(100)}); }),
        HasSubstr("send to rank 1"));
    given_up.fill_(7);
    // The ring is full of the first message, so this one has not begun.
    auto small = at::full({3}, 4.0f);
    EXPECT_THAT(failure_of([&] { isend(small, 1)->wait(milliseconds(50)); }),
                HasSubstr("send to rank 1"));
    small.fill_(7);
    auto next = isend(at::full({kMany}, 5.0f), 1);
    tell(group.get(), "given up");
    next->wait();
  } else {
    await(group.get(), "given up");
    auto tensor = at::zeros({kMany});
    EXPECT_THAT(failure_of([&] { recv(tensor, 0); }),
                HasSubstr("rank 0 gave up"));
    auto small = at::zeros({3});
    EXPECT_THAT(failure_of([&] { recv(small, 0); }),
                HasSubstr("rank 0 gave up"));
    recv(tensor, 0);
    EXPECT_TRUE(all_are(tensor, 5));
  }
  barrier();
}

// Regression: no handle was left for the messages that had begun.
WORLD_TEST(ShmGivenUpMessages, ABatchThatFailsHalfWayGivesUpWhatItBegan, 2) {
  auto group = init_shm();
  auto received = at::zeros({3});
  if (world.rank == 0) {
    // A contiguous copy would need more memory than there is.
    auto wrong = at::zeros({1}).expand({int64_t{1} << 46});
    EXPECT_ANY_THROW(batch_isend_irecv(
        {{.op = P2POp::Kind::irecv, .tensor = received, .peer = 1},
         {.op = P2POp::Kind::isend, .tensor = wrong, .peer = 1}}));
    received.fill_(7);
    tell(group.get(), "failed");
    auto tensor = at::zeros({3});
    recv(tensor, 1);
    EXPECT_TRUE(all_are(tensor, 5));
    EXPECT_TRUE(all_are(received, 7));
  } else {
    await(group.get(), "failed");
    send(at::full({3}, 5.0f), 0);
  }
  barrier();
}

// Regression: a thread that moved messages still wrote into the tensor.
WORLD_TEST(ShmGivenUpMessages, AfterAbortNoTensorIsTouched, 2) {
  auto group = init_shm();
  auto small = at::zeros({3});
  auto large = at::zeros({kMany});
  if (world.rank == 0) {
    auto first = irecv(small, 1, {.tag = 1});
    auto second = irecv(large, 1, {.tag = 2});
    group->abort();
    EXPECT_TRUE(first->isCompleted());
    EXPECT_TRUE(second->isCompleted());
    small.fill_(7);
    large.fill_(7);
    tell(group.get(), "aborted");
    await(group.get(), "sent");
    EXPECT_THAT(failure_of([&] { first->wait(); }), HasSubstr("aborted"));
    EXPECT_THAT(failure_of([&] { second->wait(); }), HasSubstr("aborted"));
    EXPECT_TRUE(all_are(small, 7));
    EXPECT_TRUE(all_are(large, 7));
    tell(group.get(), "seen");
  } else {
    await(group.get(), "aborted");
    EXPECT_THAT(failure_of([&] {
                  for (int i = 0; i < 2; ++i) send(large, 0, {.tag = 2});
                }),
                HasSubstr("rank 0"));
    tell(group.get(), "sent");
    await(group.get(), "seen");
  }
}

// Regression: isCompleted() of a work moved all messages, even after the end of
// its group.
WORLD_TEST(ShmGivenUpMessages, AfterDestroyNoTensorIsTouched, 2) {
  auto whole = init_shm();
  auto group = new_group();
  if (world.rank == 0) {
    auto tensor = at::zeros({3});
    auto other = at::zeros({3});
    const auto work = irecv(tensor, 1, {.group = group, .tag = 1});
    const auto beside = irecv(other, 1, {.group = group, .tag = 2});
    destroy_process_group(group);
    other.fill_(7);
    tell(whole.get(), "destroyed");
    await(whole.get(), "sent");
    EXPECT_TRUE(work->isCompleted());
    EXPECT_THAT(failure_of([&] { beside->wait(); }), HasSubstr("destroyed"));
    EXPECT_TRUE(all_are(other, 7));
  } else {
    await(whole.get(), "destroyed");
    // The send succeeds because the message fits into the ring: only ranks that
    // wait see that a peer has left.
    send(at::full({3}, 5.0f), 0, {.group = group, .tag = 2});
    tell(whole.get(), "sent");
  }
}

}  // namespace
}  // namespace lockstep::internal

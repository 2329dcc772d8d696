// Tests what CollectiveWork makes of works that say less than others.
#include "lockstep/comm/collective_work.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;

// A work that has ended and, as those of NCCL, does not answer isSuccess().
class SilentWork final : public Work {
 public:
  explicit SilentWork(const std::exception_ptr& failure)
      : Work(0, c10d::OpType::ALLREDUCE) {
    exception_ = failure;
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override {
    C10_THROW_ERROR(NotImplementedError, "isSuccess() is deprecated");
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(std::vector<at::Tensor>());
    return future;
  }
};

WorkPtr silent_work(const std::exception_ptr& failure = nullptr) {
  Call call("all_reduce", nullptr, {});
  Buffers buffers(call);
  buffers.reduce(at::ones({2}));
  return run_collective(
      std::move(call), /*async_op=*/true, std::move(buffers), {},
      [&] { return c10::make_intrusive<SilentWork>(failure); });
}

// With NCCL, isCompleted() and isSuccess() threw NotImplementedError.
WORLD_TEST(CollectiveWork, AsksNoBackendsWorkWhetherItSucceeded, 1) {
  auto group = init_process_group("gloo");
  auto work = silent_work();
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_EQ(work->exception(), nullptr);
  auto joined = join_works({work, silent_work()});
  EXPECT_TRUE(joined->isCompleted());
  EXPECT_TRUE(joined->isSuccess());

  auto failed = silent_work(
      std::make_exception_ptr(std::runtime_error("rank 1 is late")));
  EXPECT_TRUE(failed->isCompleted());
  EXPECT_FALSE(failed->isSuccess());
  joined = join_works({work, failed});
  EXPECT_FALSE(joined->isSuccess());
  EXPECT_THAT([&] { std::rethrow_exception(joined->exception()); },
              ThrowsMessage<std::runtime_error>(HasSubstr("rank 1 is late")));
}

WORLD_TEST(CollectiveWork, JoinedWorksGiveTheTensorsOfAll, 1) {
  auto group = init_process_group("gloo");
  const auto joined = join_works({silent_work(), silent_work()});
  EXPECT_EQ(joined->getFuture()->value().toTensorVector().size(), 2);
  EXPECT_EQ(joined->result().size(), 2);
}

}  // namespace
}  // namespace lockstep::internal

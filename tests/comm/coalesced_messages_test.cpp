// The order in which batch_isend_irecv() gives its messages to a backend that
// can start several at once, as NCCL. There, messages that were started one by
// one waited for each other on both ranks: a deadlock.
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/point_to_point.h"
#include "lockstep/comm/work_queue.h"
#include "tests/comm/failure_of.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::failure_of;
using ::testing::HasSubstr;

class EndedWork final : public Work {
 public:
  EndedWork() : Work(0, c10d::OpType::COALESCED) {}
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

// Notes its calls. As NCCL's, it returns no works of single messages between
// startCoalescing() and endCoalescing().
class CoalescingBackend final : public c10d::Backend {
 public:
  CoalescingBackend() : Backend(0, 3) {}
  const std::string getBackendName() const override { return "coalescing"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    calls.emplace_back("start");
    inside_ = true;
  }
  WorkPtr endCoalescing() override {
    calls.emplace_back("end");
    inside_ = false;
    return c10::make_intrusive<EndedWork>();
  }
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return note("send", tensors, to, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    if (from == 2) throw std::runtime_error("rank 2 is gone");
    return note("recv", tensors, from, tag);
  }

  std::vector<std::string> calls;

 private:
  WorkPtr note(const char* what, const std::vector<at::Tensor>& tensors,
               int peer, int tag) {
    calls.push_back(
        c10::str(what, " ", tensors[0].numel(), " ", peer, " ", tag));
    if (inside_) return nullptr;
    return c10::make_intrusive<EndedWork>();
  }
  bool inside_ = false;
};

TEST(CoalescedMessages, ABatchIsStartedAsOne) {
  auto backend = c10::make_intrusive<CoalescingBackend>();
  const ProcessGroupPtr group(std::make_shared<GroupInside>(
      "1", 0, std::vector<int>{0, 1, 2}, std::chrono::seconds(5),
      GroupInside::Generation{.store = c10::make_intrusive<c10d::HashStore>(),
                              .backends = {{c10::kCPU, backend}}},
      "cpu:coalescing", false));
  auto arrives = at::zeros({3});
  const P2POp receive{.op = P2POp::Kind::irecv,
                      .tensor = arrives,
                      .peer = 1,
                      .group = group,
                      .tag = 7};
  const P2POp send{.op = P2POp::Kind::isend,
                   .tensor = at::ones({2}),
                   .peer = 1,
                   .group = group};
  auto works = batch_isend_irecv({receive, send});
  EXPECT_THAT(backend->calls,
              ElementsAre("start", "recv 3 1 7", "send 2 1 0", "end"));
  ASSERT_EQ(works.size(), 2u);
  for (const auto& work : works) EXPECT_TRUE(work->wait());
  EXPECT_TRUE(works[0]->result().at(0).is_same(arrives));

  // A failure leaves nothing open, or nothing would ever be started again.
  backend->calls.clear();
  P2POp fails = receive;
  fails.peer = 2;
  EXPECT_THAT(
      failure_of([&] { batch_isend_irecv({send, fails}); }),
      AllOf(HasSubstr("group '1' on rank 0"), HasSubstr("rank 2 is gone")));
  EXPECT_THAT(backend->calls, ElementsAre("start", "send 2 1 0", "end"));
}

}  // namespace
}  // namespace lockstep::internal

// Tests what operations write to the flight recorder of their group.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

FlightRecord last_record(const FlightRecorder& flight) {
  FlightRecord record{};
  EXPECT_TRUE(flight.read(flight.last_id(), record));
  return record;
}

WORLD_TEST(FlightHooks, CollectivesRecordWhatRanksMustAgreeOn, 1, 2) {
  auto group = init_process_group("gloo", {.timeout = seconds(30)});
  const auto& flight = *inside(group).flight();
  const int last = world.size - 1;
  const auto tensor = at::ones({2, 3});

  all_reduce(tensor, {.op = ReduceOp::MAX});
  auto record = last_record(flight);
  EXPECT_STREQ(record.call.operation, "all_reduce");
  EXPECT_STREQ(record.call.dtype, "Float");
  EXPECT_STREQ(record.call.reduce_op, "MAX");
  EXPECT_EQ(record.call.number, 1u);
  EXPECT_EQ(record.call.peer, -1);
  EXPECT_EQ(record.call.in_elements, 6u);
  EXPECT_EQ(record.call.out_elements, 6u);
  EXPECT_EQ(record.state, FlightState::completed);
  EXPECT_GE(record.ended_ns, record.created_ns);

  broadcast(tensor.to(at::kInt), last);
  record = last_record(flight);
  EXPECT_STREQ(record.call.dtype, "Int");
  EXPECT_EQ(record.call.reduce_op, nullptr);
  EXPECT_EQ(record.call.peer, last);
  EXPECT_EQ(record.call.in_elements, world.rank == last ? 6u : 0u);
  EXPECT_EQ(record.call.out_elements, world.rank == last ? 0u : 6u);

  auto gathered = at::empty({world.size * 2, 3});
  all_gather_into_tensor(gathered, tensor);
  record = last_record(flight);
  EXPECT_EQ(record.call.in_elements, 6u);
  EXPECT_EQ(record.call.out_elements, 6u * world.size);

  barrier();
  record = last_record(flight);
  EXPECT_STREQ(record.call.operation, "barrier");
  EXPECT_EQ(record.call.dtype, nullptr);
  EXPECT_EQ(record.call.number, 4u);

  monitored_barrier();
  record = last_record(flight);
  EXPECT_STREQ(record.call.operation, "monitored_barrier");
  EXPECT_EQ(record.call.number, 5u);
  EXPECT_EQ(record.state, FlightState::completed);
  EXPECT_EQ(flight.last_id(), 5u);
}

WORLD_TEST(FlightHooks, AsynchronousEndIsRecordedBeforeAnyoneWaits, 2) {
  auto group = init_process_group("gloo", {.timeout = seconds(30)});
  auto tensor = at::ones({100});
  auto work = all_reduce(tensor, {.async_op = true});
  const auto deadline = Deadline::after(seconds(20));
  while (last_record(*inside(group).flight()).state != FlightState::completed &&
         !deadline.expired()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(last_record(*inside(group).flight()).state, FlightState::completed);
  work->wait();
  EXPECT_EQ(tensor[0].item<float>(), 2);
}

WORLD_TEST(FlightHooks, MessagesAreRecordedWithTheirPeer, 2) {
  auto group = init_process_group("gloo", {.timeout = seconds(30)});
  auto tensor = at::ones({5});
  const int peer = 1 - world.rank;
  if (world.rank == 0) {
    send(tensor, peer);
  } else {
    irecv(tensor, peer)->wait();
  }
  const auto record = last_record(*inside(group).flight());
  EXPECT_STREQ(record.call.operation, world.rank == 0 ? "send" : "irecv");
  EXPECT_EQ(record.call.number, 0u);
  EXPECT_EQ(record.call.peer, peer);
  EXPECT_EQ(record.call.in_elements, world.rank == 0 ? 5u : 0u);
  EXPECT_EQ(record.state, FlightState::completed);
  EXPECT_EQ(inside(group).flight()->last_number(), 0u);
}

WORLD_TEST(FlightHooks, FailedCallIsRecordedAndItsErrorNamesTheFile, 2) {
  auto group = init_process_group("gloo", {.timeout = seconds(30)});
  if (world.rank == 0) {
    EXPECT_THAT([] { monitored_barrier({.timeout = milliseconds(100)}); },
                ThrowsMessage<c10::DistBackendError>(HasSubstr(
                    "; flight record: " + (world.folder / "flight").string())));
    EXPECT_EQ(last_record(*inside(group).flight()).state, FlightState::failed);
    inside(group).store()->set("failed", std::vector<uint8_t>{1});
  } else {
    inside(group).store()->wait({"failed"}, seconds(30));
  }
}

}  // namespace
}  // namespace lockstep::internal

#include "lockstep/launch/agent/announcement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/launch/agent/worker_store_service.h"
#include "lockstep/worker/worker_call.h"
#include "lockstep/worker/worker_store_link.h"

namespace lockstep::internal {
namespace {

using State = Announcement::State;

// A workers' store that answers when the test says so.
class SilentStore {
 public:
  const std::string& name() const { return name_; }
  // Accepts the connection of an announcement.
  void accept() { connection_ = accept_from(listener_); }
  WorkerCall next_call() {
    std::optional<std::string> message;
    while (!(message = input_.take())) {
      std::array<char, 4096> bytes;
      const ssize_t got =
          ::recv(connection_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got <= 0) return {};
      input_.append({bytes.data(), static_cast<size_t>(got)});
    }
    return parse_worker_call(*message);
  }
  void answer(const WorkerReply& reply) {
    const std::string bytes = with_length(bytes_of(reply));
    EXPECT_EQ(::send(connection_.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  void hang_up() { connection_.reset(); }

 private:
  const std::string name_ =
      "lockstep-test-announcement-" + std::to_string(::getpid());
  const FileDescriptor listener_ = listen_at(name_, SocketKind::stream);
  FileDescriptor connection_{};
  MessageBuffer input_{};
};

TEST(Announcement, DoesNotWaitForTheStore) {
  SilentStore store;
  Announcement one(store.name(), 2, 1, 3, {.cause = "rank 1 failed"});
  EXPECT_EQ(one.look(), State::asked);
  store.accept();
  const WorkerCall call = store.next_call();
  EXPECT_EQ(call.operation, WorkerCall::Operation::compare_set);
  EXPECT_EQ(call.key, "heal/2/generation/1");
  EXPECT_EQ(call.value, "rank 1 failed");
  EXPECT_EQ(one.look(), State::asked);
  store.answer({.kind = WorkerReply::Kind::value, .text = "rank 1 failed"});
  EXPECT_EQ(one.look(), State::made);
  EXPECT_EQ(one.generation(), 1);
}

TEST(Announcement, TakesTheNextNumberThatNoOtherNodeHas) {
  SilentStore store;
  Announcement one(store.name(), 0, 1, 2,
                   {.cause = "rank 1 failed", .places = {0, 2, 3}});
  store.accept();
  EXPECT_EQ(store.next_call().key, "heal/0/generation/1");
  store.answer({.kind = WorkerReply::Kind::value, .text = "rank 5 failed"});
  EXPECT_EQ(one.look(), State::asked);
  const WorkerCall second = store.next_call();
  EXPECT_EQ(second.key, "heal/0/generation/2");
  const auto notice = generation_notice_of(second.value);
  EXPECT_EQ(notice.cause, "rank 1 failed");
  EXPECT_EQ(notice.places, std::vector<int>({0, 2, 3}));
  store.answer({.kind = WorkerReply::Kind::value, .text = "rank 4 failed"});
  EXPECT_EQ(one.look(), State::none_free);
}

// Another node has given up place 1 meanwhile.
TEST(Announcement, GivesUpPlacesOfThoseThatAreLeft) {
  for (const bool any_left : {true, false}) {
    SilentStore store;
    Announcement one(store.name(), 0, 1, 2,
                     {.cause = "rank 2 failed", .places = {0, 1, 2}}, {2});
    store.accept();
    EXPECT_EQ(store.next_call().keys, std::vector<std::string>{"heal/0/ended"});
    store.answer({.kind = WorkerReply::Kind::absent});
    EXPECT_EQ(one.look(), State::asked);
    EXPECT_EQ(store.next_call().value, "rank 2 failed\nplaces 0 and 1");
    const std::string left = any_left ? "places 0 and 2" : "place 2";
    store.answer(
        {.kind = WorkerReply::Kind::value, .text = "rank 1 failed\n" + left});
    EXPECT_EQ(one.look(), any_left ? State::asked : State::none_left);
    if (!any_left) continue;
    const std::string text = "rank 2 failed\nplace 0";
    EXPECT_EQ(store.next_call().value, text);
    store.answer({.kind = WorkerReply::Kind::value, .text = text});
    EXPECT_EQ(one.look(), State::made);
    EXPECT_EQ(one.notice().places, std::vector<int>({0}));
  }
}

TEST(Announcement, GivesUpNoPlaceIfARankHasEndedItsTraining) {
  SilentStore store;
  Announcement one(store.name(), 0, 1, 2,
                   {.cause = "rank 1 failed", .places = {0, 1}}, {1});
  store.accept();
  EXPECT_EQ(store.next_call().operation, WorkerCall::Operation::check);
  store.answer({.kind = WorkerReply::Kind::done});
  EXPECT_EQ(one.look(), State::has_ended);
}

TEST(Announcement, OfTakenPlacesKeepsThoseThatAreLeft) {
  SilentStore store;
  Announcement one(store.name(), 0, 1, 2,
                   {.cause = "node 1 was lost", .lost = {2, 3}});
  store.accept();
  EXPECT_EQ(store.next_call().value, "node 1 was lost\nlost places 2 and 3");
  store.answer({.kind = WorkerReply::Kind::value,
                .text = "rank 1 failed\nplaces 0, 2 and 3"});
  EXPECT_EQ(one.look(), State::asked);
  const auto notice = generation_notice_of(store.next_call().value);
  EXPECT_EQ(notice.cause, "node 1 was lost");
  EXPECT_EQ(notice.places, std::vector<int>({0, 2, 3}));
  EXPECT_EQ(notice.lost, std::vector<int>({2, 3}));
}

// The store is a new one, and another node, which did not know of generation 2,
// has given place 1 up there.
TEST(Announcement, OfEarlierGenerationsIsMadeWhereNoneIs) {
  const std::string name =
      "lockstep-test-earlier-" + std::to_string(::getpid());
  const WorkerStoreService service(name, 0, nullptr);
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  WorkerStoreLink store(name, deadline);
  const std::string given_up = "rank 1 failed\nplaces 0 and 2";
  store.call({.operation = WorkerCall::Operation::set,
              .key = generation_key(5, 2),
              .value = given_up},
             deadline);
  const auto notice = [&](int generation) {
    return store
        .call({.operation = WorkerCall::Operation::get,
               .key = generation_key(5, generation)},
              deadline)
        .text;
  };
  for (int agent = 0; agent < 2; ++agent) {
    EXPECT_EQ(announce_earlier(store, 5, 3, deadline),
              std::vector<int>({0, 2}));
    EXPECT_EQ(notice(2), given_up);
    for (const int generation : {1, 3}) {
      const auto written = generation_notice_of(notice(generation));
      EXPECT_FALSE(written.cause.empty()) << generation;
      EXPECT_TRUE(written.places.empty() && written.lost.empty());
    }
    EXPECT_FALSE(store.check({generation_key(5, 4)}, deadline));
    EXPECT_FALSE(store.check({generation_key(5, 0)}, deadline));
  }
}

TEST(Announcement, OfNoNumberIsNotMade) {
  Announcement one("lockstep-test-no-store", 0, 3, 2,
                   {.cause = "rank 1 failed"});
  EXPECT_EQ(one.look(), State::none_free);
}

TEST(Announcement, AStoreThatGoesIsAnError) {
  SilentStore store;
  Announcement one(store.name(), 0, 1, 2, {.cause = "rank 1 failed"});
  store.accept();
  store.hang_up();
  EXPECT_THROW(one.look(), WorkerStoreLost);
  EXPECT_THROW(Announcement("lockstep-test-no-store", 0, 1, 2,
                            {.cause = "rank 1 failed"}),
               WorkerStoreLost);
}

}  // namespace
}  // namespace lockstep::internal

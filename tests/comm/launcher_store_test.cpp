// The launcher's store as a c10d::Store, call by call beside TCPStore.
#include "lockstep/comm/launcher_store.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/agent/worker_store_service.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class LauncherStores : public ::testing::Test {
 protected:
  c10::intrusive_ptr<LauncherStore> open(milliseconds timeout = seconds(20)) {
    return c10::make_intrusive<LauncherStore>(name_, timeout);
  }

  const std::string name_ = WorkerStoreService::name_for(0, 29500);
  std::optional<WorkerStoreService> service_{std::in_place, name_, 0, nullptr};
};

// The results of each call that a caller sees.
std::vector<std::string> play(c10d::Store& store) {
  std::vector<std::string> seen;
  const auto see = [&](const std::string& what) { seen.push_back(what); };
  const std::vector<uint8_t> bytes{0, 'b', 255};
  store.set("bytes", bytes);
  see(store.get_to_str("bytes"));
  store.set("text", "one");
  store.set("text", "two");
  see(store.get_to_str("text"));
  see(std::to_string(store.add("sum", 5)));
  see(std::to_string(store.add("sum", -7)));
  see(store.get_to_str("sum"));
  store.set("number", "40");
  see(std::to_string(store.add("number", 2)));
  see(store.compareSet("cas", "expected", "new"));
  see(std::to_string(store.check({"cas"})));
  see(store.compareSet("cas", "", "first"));
  see(store.compareSet("cas", "other", "second"));
  see(store.compareSet("cas", "first", "second"));
  see(store.get_to_str("cas"));
  see(std::to_string(store.check({"bytes", "text"})));
  see(std::to_string(store.check({"bytes", "none"})));
  see(std::to_string(store.deleteKey("text")));
  see(std::to_string(store.deleteKey("text")));
  see(std::to_string(store.check({"text"})));
  store.wait({"bytes", "sum"});
  store.append("list", {'a'});
  store.append("list", {'b', 'c'});
  see(store.get_to_str("list"));
  store.multiSet({"m1", "m2"}, {{'x'}, {}});
  for (const auto& value : store.multiGet({"m2", "m1"})) {
    see({value.begin(), value.end()});
  }
  see(std::to_string(store.hasExtendedApi()));
  c10d::PrefixStore part("part",
                         c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store));
  part.set("key", "in a part");
  see(store.get_to_str("part/key"));
  return seen;
}

TEST_F(LauncherStores, EveryCallGivesWhatTcpStoreGives) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto tcp = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto expected = play(*tcp);
  EXPECT_GT(expected.size(), 20u);
  EXPECT_EQ(play(*open()), expected);
}

TEST_F(LauncherStores, GetAndWaitAreEndedByTheKey) {
  const auto store = open(seconds(60));
  const auto deadline = Deadline::after(seconds(20));
  for (int turn = 0; turn < 20; ++turn) {
    const std::string key = std::to_string(turn);
    std::thread setter([&] { open()->set(key, "value"); });
    EXPECT_EQ(store->get_to_str(key), "value");
    setter.join();
  }
  // The waits of other threads do not hold up this one.
  std::vector<std::thread> waiters;
  for (int one = 0; one < 8; ++one) {
    waiters.emplace_back([&] { store->wait({"go"}); });
  }
  EXPECT_EQ(store->add("sum", 1), 1);
  store->clone()->set("go", "now");
  for (auto& waiter : waiters) waiter.join();
  EXPECT_FALSE(deadline.expired());
}

TEST_F(LauncherStores, TimeoutsNameTheKeysAndAreTheStoresOrTheCalls) {
  const auto store = open(milliseconds(50));
  EXPECT_THAT([&] { store->get("none"); },
              ThrowsMessage<c10::DistStoreError>(
                  HasSubstr("wait timeout after 50 ms, keys: none")));
  EXPECT_THAT([&] { store->wait({"this"}, milliseconds(20)); },
              ThrowsMessage<c10::DistStoreError>(
                  HasSubstr("wait timeout after 20 ms, keys: this")));
  const auto clone = store->clone();
  clone->setTimeout(milliseconds(30));
  EXPECT_THAT([&] { clone->wait({"that"}); },
              ThrowsMessage<c10::DistStoreError>(HasSubstr("after 30 ms")));
  EXPECT_EQ(store->getTimeout(), milliseconds(50));
}

TEST_F(LauncherStores, WhatIsRefusedSaysWhy) {
  const auto store = open();
  store->set("text", "word");
  EXPECT_THAT([&] { store->add("text", 1); },
              ThrowsMessage<c10::DistStoreError>(
                  HasSubstr("holds a text, not a number (key text)")));
  EXPECT_THAT(
      [&] { store->set("large", std::string(1 << 20, 'x')); },
      ThrowsMessage<c10::DistStoreError>(HasSubstr("allowed are 122880")));
  EXPECT_EQ(store->get_to_str("text"), "word");
}

TEST_F(LauncherStores, EndOfTheAgentIsOneLine) {
  const auto store = open(seconds(60));
  std::thread ending([&] {
    open()->wait({"waiting"});
    service_.reset();
  });
  store->set("waiting", "");
  EXPECT_THAT([&] { store->wait({"never"}); },
              ThrowsMessage<c10::DistNetworkError>(
                  HasSubstr("the launcher's agent has closed the store")));
  ending.join();
  EXPECT_THAT([&] { open(); }, ThrowsMessage<c10::DistNetworkError>(
                                   HasSubstr("cannot be reached")));
}

}  // namespace
}  // namespace lockstep::internal

#include "lockstep/comm/roll_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/group_inside.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::ThrowsMessage;

// A store to which a key comes right after the first question for several.
class LateStore : public c10d::HashStore {
 public:
  explicit LateStore(std::string key) : key_(std::move(key)) {}

  bool check(const std::vector<std::string>& keys) override {
    const bool all = HashStore::check(keys);
    if (keys.size() > 1 && !key_.empty()) set(std::exchange(key_, {}), "=two");
    return all;
  }
  using Store::set;

 private:
  std::string key_;
};

std::vector<std::string> called_by(int rank,
                                   c10::intrusive_ptr<c10d::Store> store,
                                   milliseconds allowed, AfterRollCall after,
                                   const std::string& text = {}) {
  GroupInside group("default_pg", rank, {0, 1}, milliseconds(1000),
                    {.store = std::move(store)}, "", /*checks_calls=*/false);
  const std::string own = rank == 0 ? "one" : "two";
  return roll_call(group, text.empty() ? own : text, Deadline::after(allowed),
                   after);
}

// Rank 0 of two, whose deadline has expired when it asks.
std::vector<std::string> called(const std::string& key,
                                AfterRollCall after = AfterRollCall::goes_on) {
  return called_by(0, c10::make_intrusive<LateStore>(key), milliseconds(0),
                   after);
}

// The roll call failed with " did not come in time", without a rank.
TEST(RollCall, TheLastRankMayComeAtTheVeryEndOfTheTime) {
  EXPECT_THAT(called("roll_call/1/1"), ElementsAre("one", "two"));
}

TEST(RollCall, ARankThatDoesNotComeIsNamed) {
  EXPECT_THAT([] { called("elsewhere"); },
              ThrowsMessage<RollCallError>("rank 1 did not come in time"));
}

TEST(RollCall, BeforeAnErrorTheTextOfAnAbsentRankIsEmpty) {
  EXPECT_THAT(called("elsewhere", AfterRollCall::throws),
              ElementsAre("one", ""));
}

TEST(RollCall, BeforeAnErrorNoRankReturnsUntilAllHaveRead) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto call = [&](int rank) {
    EXPECT_THAT(called_by(rank, store, seconds(60), AfterRollCall::throws),
                ElementsAre("one", "two"));
    EXPECT_TRUE(store->check({"roll_call/1/read/0", "roll_call/1/read/1"}));
  };
  std::thread other(call, 1);
  call(0);
  other.join();
}

// A rank that reads late.
class SlowStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override {
    std::this_thread::sleep_for(milliseconds(300));
    auto values = PrefixStore::multiGet(keys);
    has_read = true;
    return values;
  }

  std::atomic<bool> has_read{false};
};

// Rank 0 left a monitored_barrier(), and the store with it, before another rank
// had read that all had come.
TEST(RollCall, BeforeRanksMayLeaveRankZeroWaitsForAllToRead) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto here = c10::make_intrusive<c10d::PrefixStore>("group", store);
  const auto there = c10::make_intrusive<SlowStore>("group", store);
  const auto call = [&](int rank, const c10::intrusive_ptr<c10d::Store>& its) {
    return called_by(rank, its, seconds(60), AfterRollCall::may_leave, "same");
  };
  std::thread other([&] { call(1, there); });
  call(0, here);
  EXPECT_TRUE(there->has_read);
  other.join();
  EXPECT_FALSE(here->check({"roll_call/1/read"}));
}

// Counts how often a rank says that it has read, or asks which ranks have.
class ReadersStore : public c10d::HashStore {
 public:
  int64_t add(const std::string& key, int64_t value) override {
    ++adds;
    return HashStore::add(key, value);
  }
  std::atomic<int> adds{0};
};

TEST(RollCall, RankZeroDoesNotWaitForARankThatCalledAnother) {
  const auto store = c10::make_intrusive<ReadersStore>();
  const auto call = [&](int rank) {
    return called_by(
        rank, store, seconds(60),
        rank == 0 ? AfterRollCall::may_leave : AfterRollCall::goes_on);
  };
  std::thread other(call, 1);
  EXPECT_THAT(call(0), ElementsAre("one", "two"));
  other.join();
  EXPECT_EQ(store->adds, 0);
}

TEST(RollCall, RankZeroReturnsIfAnotherNeverSaysThatItHasRead) {
  const auto store = c10::make_intrusive<ReadersStore>();
  const auto call = [&](int rank, milliseconds allowed) {
    return called_by(
        rank, store, allowed,
        rank == 0 ? AfterRollCall::may_leave : AfterRollCall::goes_on, "same");
  };
  std::thread other([&] { call(1, seconds(60)); });
  EXPECT_THAT(call(0, seconds(60)), ElementsAre("same", "same"));
  other.join();
  EXPECT_GT(store->adds, 1);
}

}  // namespace
}  // namespace lockstep::internal

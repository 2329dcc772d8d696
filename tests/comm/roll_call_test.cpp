#include "lockstep/comm/roll_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/group_inside.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
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
                                   milliseconds allowed, bool before_error) {
  GroupInside group("default_pg", rank, {0, 1}, milliseconds(1000),
                    {.store = std::move(store)}, "", /*checks_calls=*/false);
  return roll_call(group, rank == 0 ? "one" : "two", Deadline::after(allowed),
                   before_error);
}

// Rank 0 of two, whose deadline has expired when it asks.
std::vector<std::string> called(const std::string& key,
                                bool before_error = false) {
  return called_by(0, c10::make_intrusive<LateStore>(key), milliseconds(0),
                   before_error);
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
  EXPECT_THAT(called("elsewhere", /*before_error=*/true),
              ElementsAre("one", ""));
}

TEST(RollCall, BeforeAnErrorNoRankReturnsUntilAllHaveRead) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto call = [&](int rank) {
    EXPECT_THAT(called_by(rank, store, std::chrono::seconds(60), true),
                ElementsAre("one", "two"));
    EXPECT_TRUE(store->check({"roll_call/1/read/0", "roll_call/1/read/1"}));
  };
  std::thread other(call, 1);
  call(0);
  other.join();
}

}  // namespace
}  // namespace lockstep::internal

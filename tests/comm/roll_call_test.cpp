#include "lockstep/comm/roll_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
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

// Rank 0 of two, whose deadline has expired when it asks.
std::vector<std::string> called(const std::string& key) {
  GroupInside group("default_pg", /*rank=*/0, {0, 1}, milliseconds(1000),
                    c10::make_intrusive<LateStore>(key), nullptr, {}, "",
                    /*checks_calls=*/false);
  return roll_call(group, "one", Deadline::after(milliseconds(0)));
}

// The roll call failed with " did not come in time", without a rank.
TEST(RollCall, TheLastRankMayComeAtTheVeryEndOfTheTime) {
  EXPECT_THAT(called("roll_call/1/1"), ElementsAre("one", "two"));
}

TEST(RollCall, ARankThatDoesNotComeIsNamed) {
  EXPECT_THAT([] { called("elsewhere"); },
              ThrowsMessage<RollCallError>("rank 1 did not come in time"));
}

}  // namespace
}  // namespace lockstep::internal

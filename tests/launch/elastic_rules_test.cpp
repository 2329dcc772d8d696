// The rules by which the host of the agents' store decides, without a store.
#include "lockstep/launch/nodes/elastic_rules.h"

#include <gmock/gmock.h>

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;

using Clock = ElasticRules::Clock;

TEST(MemberOrder, FirstRoundGoesByNodeRank) {
  EXPECT_THAT(
      order_members({{.node_rank = 3}, {.node_rank = 0}, {.node_rank = 2}}),
      ElementsAre(0, 2, 3));
}

TEST(MemberOrder, SurvivorsKeepTheirPlacesAndTheOthersFillTheHoles) {
  const auto at = [](int node_rank, int place, int round = 4) {
    return Candidate{node_rank, place, round};
  };
  // The second of four nodes is gone: only the last one moves.
  EXPECT_THAT(order_members({at(0, 0), at(2, 2), at(3, 3)}),
              ElementsAre(0, 3, 2));
  // A new node takes the place of the one that is gone.
  EXPECT_THAT(order_members({at(0, 0), {.node_rank = 1}, at(2, 2), at(3, 3)}),
              ElementsAre(0, 1, 2, 3));
  // The node in place 0 is gone; the new one has a higher node rank.
  EXPECT_THAT(order_members({at(1, 1), at(2, 2), {.node_rank = 3}}),
              ElementsAre(3, 1, 2));
  // Nodes that move keep their order, and come before new ones.
  EXPECT_THAT(order_members({at(0, 5), at(1, 4), {.node_rank = 2}}),
              ElementsAre(1, 0, 2));
}

TEST(MemberOrder, PlaceOfANodeThatWasAwayIsItsSuccessors) {
  EXPECT_THAT(order_members({{0, 0, 3}, {1, 1, 2}, {2, 1, 3}}),
              ElementsAre(0, 2, 1));
}

class ElasticRulesTest : public ::testing::Test {
 protected:
  ElasticRules rules_{{.last_call = seconds(30),
                       .scale_up_wait = seconds(300),
                       .failures = 2,
                       .within = seconds(100),
                       .cooling = seconds(50)},
                      /*fewest=*/2,
                      /*most=*/4};
  Clock::time_point now_ = Clock::now();
};

TEST_F(ElasticRulesTest, FirstRoundBeginsAtMostOrAfterTheLastCall) {
  EXPECT_FALSE(rules_.may_begin(1, true, true, now_));
  EXPECT_TRUE(rules_.may_begin(4, false, true, now_));
  now_ += seconds(1000);  // the last call begins only when there are enough
  EXPECT_FALSE(rules_.may_begin(2, true, true, now_));
  now_ += seconds(29);
  EXPECT_FALSE(rules_.may_begin(3, true, true, now_));
  now_ += seconds(1);
  EXPECT_FALSE(rules_.may_begin(1, true, true, now_));
  EXPECT_TRUE(rules_.may_begin(3, true, true, now_));
}

TEST_F(ElasticRulesTest, LaterRoundsBeginOnceAllHaveOffered) {
  EXPECT_FALSE(rules_.may_begin(1, true, false, now_));
  EXPECT_FALSE(rules_.may_begin(2, false, false, now_));
  EXPECT_TRUE(rules_.may_begin(2, true, false, now_));
}

TEST_F(ElasticRulesTest, AtAnotherStoreTheSurvivorsAreEnough) {
  rules_.expect(3);
  EXPECT_FALSE(rules_.may_begin(2, true, true, now_));
  EXPECT_TRUE(rules_.may_begin(3, true, true, now_));
}

TEST_F(ElasticRulesTest, NodesThatWaitAreLetInAfterASnapshotOrATime) {
  EXPECT_FALSE(rules_.note_waiting(0, now_));
  EXPECT_FALSE(rules_.may_grow(now_));
  EXPECT_TRUE(rules_.note_waiting(1, now_));
  EXPECT_FALSE(rules_.note_waiting(2, now_ + seconds(200)))
      << "the first one counts";
  EXPECT_FALSE(rules_.may_grow(now_ + seconds(299)));
  EXPECT_TRUE(rules_.may_grow(now_ + seconds(300)));
  rules_.note_snapshot();
  EXPECT_TRUE(rules_.may_grow(now_));
  rules_.begin_round();
  EXPECT_FALSE(rules_.may_grow(now_ + seconds(300)));
  // It went away again.
  EXPECT_TRUE(rules_.note_waiting(1, now_));
  EXPECT_FALSE(rules_.note_waiting(0, now_));
  EXPECT_FALSE(rules_.may_grow(now_ + seconds(300)));
}

TEST_F(ElasticRulesTest, SnapshotBeforeTheWaitDoesNotCount) {
  rules_.note_snapshot();
  EXPECT_TRUE(rules_.note_waiting(1, now_));
  EXPECT_FALSE(rules_.may_grow(now_));
}

TEST_F(ElasticRulesTest, NodeThatFailsOftenIsLeftOutForAWhile) {
  EXPECT_FALSE(rules_.note_failure("a", now_));
  EXPECT_FALSE(rules_.note_failure("b", now_));
  EXPECT_FALSE(rules_.note_failure("a", now_ + seconds(101)));
  EXPECT_TRUE(rules_.note_failure("a", now_ + seconds(150)));
  EXPECT_TRUE(rules_.is_left_out("a", now_ + seconds(199)));
  EXPECT_FALSE(rules_.is_left_out("b", now_ + seconds(199)));
  EXPECT_FALSE(rules_.is_left_out("a", now_ + seconds(200)));
  EXPECT_FALSE(rules_.note_failure("a", now_ + seconds(210)))
      << "it is tried again";
}

TEST_F(ElasticRulesTest, NoNodeIsLeftOutUnlessAskedFor) {
  ElasticRules rules({}, 2, 4);
  for (int failure = 0; failure < 100; ++failure) {
    EXPECT_FALSE(rules.note_failure("a", now_));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing

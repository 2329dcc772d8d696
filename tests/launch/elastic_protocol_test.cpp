// Tests what agents of MIN to MAX nodes agree on in their store, without a
// network and without waiting.
#include <gmock/gmock.h>

#include <deque>

#include "lockstep/launch/nodes/node_protocol.h"
#include "tests/launch/memory_agent_store.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Kind = Verdict::Kind;

class ElasticProtocolTest : public ::testing::Test {
 protected:
  NodeDescription node() {
    NodeDescription description;
    description.nnodes = 4;
    description.min_nodes = 2;
    description.max_restarts = 1;
    description.max_membership_changes = changes_allowed_;
    description.heals = description.shrinks = shrinks_;
    description.host = "host" + std::to_string(agents_.size());
    description.hosts_store = agents_.empty();
    description.keep_alive.max_attempt = 3;
    description.elastic_options = {.last_call = seconds(30),
                                   .scale_up_wait = seconds(100),
                                   .failures = failures_};
    return description;
  }

  // Adds an agent that joins and offers the round that it finds.
  NodeProtocol& come() {
    NodeProtocol& agent = agents_.emplace_back(store_, node());
    offer(agent, agent.join().round);
    return agent;
  }

  static void offer(NodeProtocol& agent, int round) {
    agent.offer_round(round, {"192.0.2.1", 4000 + round});
  }

  // Lets `time` pass; the agents `silent` show no sign of life in it.
  void pass(int time, std::set<size_t> silent = {}) {
    for (int second = 0; second < time; ++second) {
      now_ += seconds(1);
      for (size_t at = 0; at < agents_.size(); ++at) {
        if (silent.count(at) + gone_.count(at) == 0) agents_[at].beat(now_);
      }
    }
  }

  // Begins round 0 with so many nodes.
  void begin(size_t nodes) {
    while (agents_.size() < nodes) come();
    pass(nodes == 4 ? 1 : 32);
    for (auto& agent : agents_) ASSERT_TRUE(agent.take_plan());
  }

  // Returns what each agent is told of the round: its place, or nothing.
  std::vector<std::optional<int>> places(std::vector<size_t> which) {
    std::vector<std::optional<int>> all;
    for (const size_t at : which) {
      const auto plan = agents_[at].take_plan();
      all.push_back(plan ? std::optional(plan->place.node_rank) : std::nullopt);
    }
    return all;
  }

  Verdict lose(size_t at) {
    pass(20, {at});
    Verdict told;
    for (size_t one = 0; one < agents_.size(); ++one) {
      if (one == at) continue;
      const auto verdict = agents_[one].take_verdict();
      EXPECT_TRUE(verdict);
      if (verdict) told = *verdict;
    }
    return told;
  }

  static Verdict failed(int node_rank) {
    Verdict verdict;
    verdict.kind = Kind::failed;
    verdict.node_rank = node_rank;
    verdict.exit_code = 42;
    return verdict;
  }

  std::shared_ptr<StoredKeys> keys_ = std::make_shared<StoredKeys>();
  MemoryAgentStore store_{keys_};
  std::deque<NodeProtocol> agents_;
  std::optional<int> changes_allowed_{};
  int failures_ = 0;
  bool shrinks_ = false;
  std::set<size_t> gone_{};  // agents that do nothing any more
  NodeProtocol::Clock::time_point now_ = NodeProtocol::Clock::now();
};

using Places = std::vector<std::optional<int>>;

TEST_F(ElasticProtocolTest, FirstRoundBeginsAtOnceWithMaxNodes) {
  begin(4);
  EXPECT_FALSE(agents_[0].take_verdict());
}

TEST_F(ElasticProtocolTest, FirstRoundBeginsWithFewerAfterTheLastCall) {
  come();
  pass(100);
  EXPECT_FALSE(agents_[0].take_plan());
  EXPECT_EQ(agents_[0].absent_nodes().size(), 3u);
  come();
  come();
  pass(29);
  EXPECT_FALSE(agents_[0].take_plan());
  pass(3);
  for (int place = 0; place < 3; ++place) {
    const auto plan = agents_[static_cast<size_t>(place)].take_plan();
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->place.node_rank, place);
    EXPECT_EQ(plan->place.nnodes, 3);
    EXPECT_EQ(plan->place.world_size, 3);
    EXPECT_EQ(plan->restarts_used, 0);
  }
}

TEST_F(ElasticProtocolTest, RoundSucceedsOnceItsMembersHave) {
  begin(2);
  agents_[0].report_success();
  EXPECT_FALSE(agents_[1].take_verdict());
  agents_[1].report_success();
  for (auto& agent : agents_) {
    EXPECT_EQ(agent.take_verdict()->kind, Kind::succeeded);
  }
}

TEST_F(ElasticProtocolTest, LostNodeLeadsToARoundOfTheOthersAndCostsNoRestart) {
  begin(4);
  const Verdict verdict = lose(1);
  EXPECT_EQ(verdict.kind, Kind::node_lost);
  EXPECT_EQ(verdict.node_rank, 1);
  EXPECT_THAT(verdict.text,
              AllOf(HasSubstr("node 1 ("), HasSubstr("no sign of life")));
  EXPECT_EQ(verdict.changes.restarts, 0);
  EXPECT_EQ(verdict.changes.membership_changes, 1);
  EXPECT_FALSE(verdict.ends_job({.restarts = 0}));
  offer(agents_[0], 1);
  offer(agents_[2], 1);
  pass(5, {1});
  EXPECT_FALSE(agents_[0].take_plan()) << "node 3 still stops its workers";
  offer(agents_[3], 1);
  pass(1, {1});
  EXPECT_EQ(places({0, 2, 3}), (Places{0, 2, 1}));
  // The lost node was only stopped. It comes back, and waits.
  EXPECT_EQ(agents_[1].take_verdict()->kind, Kind::node_lost);
  offer(agents_[1], 1);
  EXPECT_FALSE(agents_[1].take_plan());
  EXPECT_TRUE(agents_[1].take_exclusion());
  EXPECT_FALSE(agents_[1].take_exclusion()) << "told once";
  EXPECT_FALSE(agents_[0].take_verdict());
}

TEST_F(ElasticProtocolTest, NewNodeTakesThePlaceOfTheLostOne) {
  begin(4);
  lose(1);
  for (const size_t at : {0u, 2u, 3u}) offer(agents_[at], 1);
  gone_ = {1};
  NodeProtocol& fresh = come();
  EXPECT_EQ(fresh.round(), 1);
  pass(1);
  EXPECT_EQ(places({0, 2, 3, 4}), (Places{0, 2, 3, 1}));
}

TEST_F(ElasticProtocolTest, BelowMinTheOthersWaitForANode) {
  begin(2);
  lose(1);
  offer(agents_[0], 1);
  pass(1000, {1});
  EXPECT_FALSE(agents_[0].take_plan());
  EXPECT_EQ(agents_[0].absent_nodes().size(), 3u);
  gone_ = {1};
  come();
  pass(1);
  EXPECT_EQ(places({0, 2}), (Places{0, 1}));
}

TEST_F(ElasticProtocolTest, NodeThatLeavesMakesRoom) {
  begin(3);
  Verdict leaves;
  leaves.kind = Kind::node_leaves;
  leaves.node_rank = 1;
  agents_[1].propose(0, leaves);
  for (auto& agent : agents_) {
    const auto verdict = agent.take_verdict();
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->kind, Kind::node_leaves);
    EXPECT_EQ(verdict->changes.membership_changes, 1);
  }
  offer(agents_[0], 1);
  offer(agents_[2], 1);
  pass(5);
  EXPECT_FALSE(agents_[0].take_plan()) << "it has not departed";
  agents_[1].depart();
  pass(1, {1});
  EXPECT_EQ(places({0, 2}), (Places{0, 1}));
}

// For example at a signal that comes while the round is being formed.
TEST_F(ElasticProtocolTest, MemberThatDepartsWithoutAWordIsNoticed) {
  begin(3);
  agents_[1].depart();
  pass(2, {1});
  const auto verdict = agents_[2].take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Kind::node_lost);
  EXPECT_EQ(verdict->node_rank, 1);
}

// The plan names node ranks, and the new agent has that of a member.
TEST_F(ElasticProtocolTest, SuccessorOfAMemberIsNoMemberOfARoundThatRuns) {
  begin(4);
  agents_[1].depart();
  gone_ = {1};
  NodeProtocol& fresh = come();
  EXPECT_EQ(fresh.round(), 0);
  EXPECT_FALSE(fresh.take_plan());
  EXPECT_TRUE(fresh.take_exclusion());
  pass(1);
  for (const size_t at : {0u, 2u, 3u, 4u}) {
    EXPECT_EQ(agents_[at].take_verdict()->kind, Kind::node_lost);
    offer(agents_[at], 1);
  }
  pass(1);
  EXPECT_EQ(places({0, 2, 3, 4}), (Places{0, 2, 3, 1}));
}

TEST_F(ElasticProtocolTest, NewNodeWaitsForASnapshot) {
  begin(2);
  NodeProtocol& fresh = come();
  EXPECT_EQ(fresh.round(), 0);
  EXPECT_FALSE(fresh.take_plan());
  EXPECT_TRUE(fresh.take_exclusion());
  pass(50);
  EXPECT_THAT(agents_[0].take_wait().value_or(""),
              AllOf(HasSubstr("node 2 (host2) waits"), HasSubstr("100 s")));
  EXPECT_FALSE(agents_[0].take_wait()) << "told once";
  EXPECT_FALSE(agents_[1].take_verdict());
  agents_[0].report_snapshot();
  pass(1);
  for (auto& agent : agents_) {
    const auto verdict = agent.take_verdict();
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->kind, Kind::node_waits);
    EXPECT_EQ(verdict->changes.membership_changes, 1);
    offer(agent, 1);
  }
  pass(1);
  EXPECT_EQ(places({0, 1, 2}), (Places{0, 1, 2}));
}

TEST_F(ElasticProtocolTest, NewNodeWaitsForATimeIfThereIsNoSnapshot) {
  begin(2);
  come();
  pass(99);
  EXPECT_FALSE(agents_[1].take_verdict());
  pass(5);
  EXPECT_EQ(agents_[1].take_verdict()->kind, Kind::node_waits);
}

TEST_F(ElasticProtocolTest, NewNodeDoesNotDisturbAJobThatIsAboutToEnd) {
  begin(2);
  agents_[1].report_success();
  come();
  pass(300);
  EXPECT_FALSE(agents_[0].take_verdict());
}

TEST_F(ElasticProtocolTest, NewNodeIsLetInThoughANodeHasLostItsWorkers) {
  shrinks_ = true;
  begin(2);
  agents_[1].report_given_up();
  come();
  pass(105);
  const auto verdict = agents_[0].take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Kind::node_waits);
}

TEST_F(ElasticProtocolTest, FailureLetsTheNodesInThatWait) {
  begin(2);
  come();
  agents_[1].propose(0, failed(1));
  for (auto& agent : agents_) {
    const auto verdict = agent.take_verdict();
    EXPECT_EQ(verdict->changes.restarts, 1);
    EXPECT_EQ(verdict->changes.membership_changes, 0);
    offer(agent, 1);
  }
  pass(1);
  for (size_t at = 0; at < 3; ++at) {
    const auto plan = agents_[at].take_plan();
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->place.nnodes, 3);
    EXPECT_EQ(plan->restarts_used, 1);
  }
}

TEST_F(ElasticProtocolTest, AllNodesCountRestartsAndChangesAlike) {
  changes_allowed_ = 2;
  begin(3);
  agents_[1].propose(0, failed(1));
  for (auto& agent : agents_) {
    EXPECT_FALSE(agent.take_verdict()->ends_job({1, 2}));
    offer(agent, 1);
  }
  pass(1);
  EXPECT_EQ(places({0, 1, 2}), (Places{0, 1, 2}));
  const Verdict lost = lose(2);
  EXPECT_EQ(lost.changes.restarts, 1);
  EXPECT_EQ(lost.changes.membership_changes, 1);
  for (const size_t at : {0u, 1u}) offer(agents_[at], 2);
  pass(1, {2});
  EXPECT_EQ(agents_[1].take_plan()->restarts_used, 1);
  ASSERT_TRUE(agents_[0].take_plan());
  // A new agent learns of them.
  gone_ = {2};
  NodeProtocol& fresh = agents_.emplace_back(store_, node());
  const Membership joined = fresh.join();
  EXPECT_EQ(joined.round, 2);
  EXPECT_EQ(joined.changes.restarts, 1);
  EXPECT_EQ(joined.changes.membership_changes, 1);
  // The next failure is one too many.
  agents_[0].propose(2, failed(0));
  for (const size_t at : {0u, 1u}) {
    const auto verdict = agents_[at].take_verdict();
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->changes.restarts, 2);
    EXPECT_TRUE(verdict->ends_job({1, 2}));
  }
}

TEST_F(ElasticProtocolTest, MembershipChangesMayBeLimited) {
  changes_allowed_ = 0;
  begin(3);
  come();
  pass(300);
  EXPECT_FALSE(agents_[0].take_verdict()) << "no change is left for a new node";
  const Verdict lost = lose(1);
  EXPECT_TRUE(lost.ends_job({1, 0}));
  EXPECT_NE(lost.exit_code, 0);
}

TEST_F(ElasticProtocolTest, NodeThatFailsOftenIsLeftOutAndTriedAgain) {
  failures_ = 1;
  begin(3);
  agents_[1].propose(0, failed(1));
  for (auto& agent : agents_) {
    ASSERT_TRUE(agent.take_verdict());
    offer(agent, 1);
  }
  EXPECT_THAT(agents_[0].take_notice().value_or(""),
              AllOf(HasSubstr("node 1 (host1)"), HasSubstr("left out")));
  pass(1);
  EXPECT_EQ(places({0, 1, 2}), (Places{0, std::nullopt, 1}));
  pass(590);
  EXPECT_FALSE(agents_[0].take_wait());
  pass(30);
  EXPECT_THAT(agents_[0].take_wait().value_or(""), HasSubstr("node 1 ("));
}

TEST_F(ElasticProtocolTest, TooFewNodesAreNotLeftOut) {
  failures_ = 1;
  begin(2);
  agents_[1].propose(0, failed(1));
  for (auto& agent : agents_) {
    ASSERT_TRUE(agent.take_verdict());
    offer(agent, 1);
  }
  pass(1);
  EXPECT_EQ(places({0, 1}), (Places{0, 1}));
}

TEST_F(ElasticProtocolTest, OneNodeTooManyMayTryAgain) {
  begin(4);
  NodeProtocol& fifth = agents_.emplace_back(store_, node());
  EXPECT_THROW(fifth.join(), RankTaken);
}

TEST_F(ElasticProtocolTest, NodesThatDisagreeOnTheirNumbersAreRefused) {
  begin(3);
  const auto refusal = [&](auto change) -> std::string {
    NodeDescription other = node();
    change(other);
    try {
      agents_.emplace_back(store_, other).join();
    } catch (const JobRefused& error) {
      return error.what();
    }
    return "was not refused";
  };
  EXPECT_THAT(refusal([](auto& node) { node.min_nodes = 3; }),
              AllOf(HasSubstr("--nnodes=3:4"), HasSubstr("--nnodes=2:4")));
  EXPECT_THAT(refusal([](auto& node) { node.max_membership_changes = 3; }),
              AllOf(HasSubstr("--max-membership-changes=3"),
                    HasSubstr("--max-membership-changes=unlimited")));
  EXPECT_THAT(refusal([](auto& node) { node.heals = true; }),
              AllOf(HasSubstr("--heal=replace"), HasSubstr("--heal=false")));
  EXPECT_THAT(refusal([](auto& node) { node.heals = node.shrinks = true; }),
              AllOf(HasSubstr("--heal=shrink"), HasSubstr("--heal=false")));
  EXPECT_FALSE(agents_[0].take_verdict()) << "the job goes on";
}

TEST_F(ElasticProtocolTest, NodeThatCannotStartEndsNoJobThatHasBegun) {
  begin(3);
  lose(2);
  Verdict verdict;
  verdict.kind = Kind::declined;
  verdict.exit_code = 127;
  agents_.emplace_back(store_, node()).decline(verdict);
  offer(agents_[0], 1);
  offer(agents_[1], 1);
  EXPECT_FALSE(agents_[0].take_verdict());
}

// Requests of a round must not grow with the square of the number of nodes.
TEST_F(ElasticProtocolTest, OffersOfManyNodesAreReadOnce) {
  class CountingStore : public MemoryAgentStore {
   public:
    using MemoryAgentStore::MemoryAgentStore;
    std::optional<std::string> get(const std::string& key) override {
      ++reads;
      return MemoryAgentStore::get(key);
    }
    int reads = 0;
  };
  std::vector<int> reads;
  for (const int nodes : {16, 64, 256}) {
    CountingStore store(std::make_shared<StoredKeys>());
    std::deque<NodeProtocol> agents;
    NodeDescription description;
    description.nnodes = nodes;
    description.min_nodes = nodes / 2;
    for (int one = 0; one < nodes; ++one) {
      description.hosts_store = one == 0;
      description.id = random_id();
      agents.emplace_back(store, description).join();
      agents.back().offer_round(0, {"192.0.2.1", 4000});
      // The host hears of each offer at once.
      agents.front().beat(now_);
    }
    ASSERT_TRUE(agents.back().take_plan());
    reads.push_back(store.reads);
  }
  EXPECT_LE(reads[1], 4 * reads[0]);
  EXPECT_LE(reads[2], 4 * reads[1]);
}

}  // namespace
}  // namespace lockstep::internal::testing

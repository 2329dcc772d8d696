// Tests what agents of several nodes write into their store and read from it,
// without a network and without waiting.
#include "lockstep/launch/nodes/node_protocol.h"

#include <gmock/gmock.h>

#include <deque>

#include "tests/launch/memory_agent_store.h"

namespace lockstep::internal::testing {
namespace {

using std::nullopt;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class NodeProtocolTest : public ::testing::Test {
 protected:
  static NodeDescription node(int nnodes, std::optional<int> rank = {},
                              int nproc_per_node = 2) {
    NodeDescription description;
    description.nnodes = nnodes;
    description.node_rank = rank;
    description.nproc_per_node = nproc_per_node;
    description.host = "host" + std::to_string(next_pid_);
    description.pid = next_pid_++;
    description.keep_alive.max_attempt = 3;
    return description;
  }

  NodeProtocol& agent(const NodeDescription& description) {
    return agents_.emplace_back(store_, description);
  }

  // Makes agents with these numbers of workers, in node order. All of them have
  // joined and made their offers.
  void form(const std::vector<int>& workers, int max_attempt = 3) {
    const int nnodes = static_cast<int>(workers.size());
    for (int rank = 0; rank < nnodes; ++rank) {
      auto description = node(nnodes, rank, workers[static_cast<size_t>(rank)]);
      description.hosts_store = rank == 0;
      description.keep_alive.max_attempt = max_attempt;
      agent(description).join();
    }
    offer(0);
  }

  void offer(int round) {
    for (size_t rank = 0; rank < agents_.size(); ++rank) {
      agents_[rank].offer_round(
          round,
          rank == 0 ? RoundOffer{"192.0.2.1", 4000 + round} : RoundOffer{});
    }
  }

  static Verdict failed(int node_rank, int exit_code) {
    Verdict verdict;
    verdict.kind = Verdict::Kind::failed;
    verdict.node_rank = node_rank;
    verdict.exit_code = exit_code;
    verdict.text = "rank failed";
    return verdict;
  }

  static std::string refusal(NodeProtocol& protocol) {
    try {
      protocol.join();
    } catch (const JobRefused& error) {
      return error.what();
    }
    return "was not refused";
  }

  static inline int next_pid_ = 100;
  std::shared_ptr<StoredKeys> keys_ = std::make_shared<StoredKeys>();
  MemoryAgentStore store_{keys_};
  std::deque<NodeProtocol> agents_;
  NodeProtocol::Clock::time_point now_ = NodeProtocol::Clock::now();
};

TEST_F(NodeProtocolTest, GlobalRanksGoByNodeThoughWorkersAreUneven) {
  form({3, 1, 2});
  const int first_ranks[] = {0, 3, 4};
  for (size_t rank = 0; rank < 3; ++rank) {
    const auto plan = agents_[rank].take_plan();
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->place.node_rank, static_cast<int>(rank));
    EXPECT_EQ(plan->place.nnodes, 3);
    EXPECT_EQ(plan->place.first_rank, first_ranks[rank]);
    EXPECT_EQ(plan->place.first_role_rank, first_ranks[rank]);
    EXPECT_EQ(plan->place.world_size, 6);
    EXPECT_EQ(plan->place.role_world_size, 6);
    EXPECT_EQ(plan->master_addr, "192.0.2.1");
    EXPECT_EQ(plan->master_port, 4000);
    EXPECT_FALSE(agents_[rank].take_plan()) << "a plan is given once";
  }
}

TEST_F(NodeProtocolTest, RoleRanksCountWithinTheRole) {
  auto trainer = node(3, 0, 2);
  auto server = node(3, 1, 3);
  auto late_trainer = node(3, 2, 1);
  server.role = "server";
  for (const auto& one : {trainer, server, late_trainer}) agent(one).join();
  offer(0);
  const auto place = agents_[2].take_plan()->place;
  EXPECT_EQ(place.first_rank, 5);
  EXPECT_EQ(place.world_size, 6);
  EXPECT_EQ(place.first_role_rank, 2);
  EXPECT_EQ(place.role_world_size, 3);
  EXPECT_EQ(agents_[1].take_plan()->place.first_role_rank, 0);
}

TEST_F(NodeProtocolTest, NodesWithoutARankTakeTheLowestThatIsFree) {
  EXPECT_EQ(agent(node(3, 1)).join().node_rank, 1);
  EXPECT_EQ(agent(node(3)).join().node_rank, 0);
  EXPECT_EQ(agent(node(3)).join().node_rank, 2);
  EXPECT_THAT(refusal(agent(node(3))), HasSubstr("one too many"));
}

TEST_F(NodeProtocolTest, AgentThatJoinsAgainKeepsTheRankThatItTook) {
  const NodeDescription self = node(3);
  EXPECT_EQ(agent(self).join().node_rank, 0);
  EXPECT_EQ(agent(node(3)).join().node_rank, 1);
  EXPECT_EQ(agent(self).join().node_rank, 0);
  EXPECT_EQ(agent(node(3)).join().node_rank, 2);
}

// Counts what all agents ask their store.
class CountingStore : public MemoryAgentStore {
 public:
  using MemoryAgentStore::MemoryAgentStore;
  void set(const std::string& key, const std::string& value) override {
    ++requests;
    MemoryAgentStore::set(key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    ++requests;
    return MemoryAgentStore::get(key);
  }
  bool check(const std::string& key) override {
    ++requests;
    return MemoryAgentStore::check(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    ++requests;
    return MemoryAgentStore::add(key, amount);
  }
  std::string set_if_absent(const std::string& key,
                            const std::string& value) override {
    ++requests;
    return MemoryAgentStore::set_if_absent(key, value);
  }

  int requests = 0;
};

TEST_F(NodeProtocolTest, RequestsGrowNoFasterThanTheNumberOfNodes) {
  for (const bool ranked : {true, false}) {
    std::vector<int> requests;
    for (const int nnodes : {16, 64, 256}) {
      CountingStore store(std::make_shared<StoredKeys>());
      std::deque<NodeProtocol> agents;
      for (int rank = 0; rank < nnodes; ++rank) {
        agents
            .emplace_back(store,
                          node(nnodes, ranked ? std::optional(rank) : nullopt))
            .join();
      }
      for (auto& one : agents) one.offer_round(0, {"192.0.2.1", 4000});
      for (auto& one : agents) ASSERT_TRUE(one.take_plan());
      for (auto& one : agents) one.report_success();
      for (auto& one : agents) ASSERT_TRUE(one.take_verdict());
      for (auto& one : agents) one.depart();
      requests.push_back(store.requests);
    }
    EXPECT_LE(requests[1], 4 * requests[0]);
    EXPECT_LE(requests[2], 4 * requests[1]);
  }
}

TEST_F(NodeProtocolTest, NoPlanBeforeAllHaveOffered) {
  auto& first = agent(node(3, 0));
  first.join();
  first.offer_round(0, {"192.0.2.1", 4000});
  auto& third = agent(node(3, 2));
  third.join();
  EXPECT_FALSE(first.take_plan());
  EXPECT_THAT(first.absent_nodes(), ElementsAre(1, 2));
  third.offer_round(0, {});
  EXPECT_THAT(third.absent_nodes(), ElementsAre(1));
}

TEST_F(NodeProtocolTest, RunIdIsTheFirstAgentsWhereOthersGiveNone) {
  auto first = node(2, 0);
  first.run_id = "456";
  EXPECT_EQ(agent(first).join().run_id, "456");
  EXPECT_EQ(agent(node(2, 1)).join().run_id, "456");
}

TEST_F(NodeProtocolTest, DisagreementNamesBothAgentsAndEndsTheWait) {
  auto first = node(2, 0);
  first.run_id = "456";
  first.max_restarts = 3;
  auto& waiting = agent(first);
  waiting.join();
  waiting.offer_round(0, {"192.0.2.1", 4000});

  auto other = first;
  other.node_rank = 1;
  other.host = "elsewhere";
  const auto refuse = [&](auto change) {
    NodeDescription changed = other;
    change(changed);
    return refusal(agent(changed));
  };
  const auto both = AllOf(HasSubstr(first.host), HasSubstr("elsewhere"));
  EXPECT_THAT(refuse([](auto& node) { node.nnodes = 3; }),
              AllOf(both, HasSubstr("--nnodes=3"), HasSubstr("--nnodes=2")));
  EXPECT_THAT(refuse([](auto& node) { node.max_restarts = 0; }),
              AllOf(both, HasSubstr("--max-restarts=0")));
  EXPECT_THAT(refuse([](auto& node) { node.run_id = "457"; }),
              AllOf(both, HasSubstr("--rdzv-id=457")));
  EXPECT_THAT(refuse([](auto& node) { node.node_rank = 0; }),
              AllOf(both, HasSubstr("--node-rank=0")));

  const auto verdict = waiting.take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::declined);
  EXPECT_THAT(verdict->text, HasSubstr("--nnodes=3")) << "the first reason";
}

TEST_F(NodeProtocolTest, StrangerDoesNotDisturbAJobThatRuns) {
  form({1, 1});
  EXPECT_THAT(refusal(agent(node(2, 1))), HasSubstr("two agents"));
  EXPECT_FALSE(agents_[0].take_verdict());
}

TEST_F(NodeProtocolTest, RoundSucceedsOnceEveryNodeHas) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[0].report_success();
  EXPECT_FALSE(agents_[0].take_verdict());
  agents_[1].report_success();
  for (auto& one : agents_) {
    const auto verdict = one.take_verdict();
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->kind, Verdict::Kind::succeeded);
    EXPECT_FALSE(one.take_verdict()) << "a verdict is given once";
  }
}

TEST_F(NodeProtocolTest, FirstVerdictStandsForAllAndEndsItsRoundOnly) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[1].propose(0, failed(1, 42));
  agents_[0].propose(0, failed(0, 7));
  for (auto& one : agents_) EXPECT_EQ(one.take_verdict()->exit_code, 42);
  Verdict verdict = failed(1, 42);
  verdict.changes = verdict.after({});
  EXPECT_FALSE(verdict.ends_job({.restarts = 1}));
  verdict.changes = verdict.after(verdict.changes);
  EXPECT_TRUE(verdict.ends_job({.restarts = 1}));

  offer(1);
  for (auto& one : agents_) {
    EXPECT_FALSE(one.take_verdict());
    const auto plan = one.take_plan();
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->round, 1);
    EXPECT_EQ(plan->master_port, 4001);
  }
}

// One node has failed and all would restart, when another node gets a signal.
TEST_F(NodeProtocolTest, VerdictOfARoundToComeStopsItBeforeItBegins) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[1].propose(0, failed(1, 42));
  Verdict signal;
  signal.kind = Verdict::Kind::signalled;
  signal.signal = 15;
  agents_[0].propose(0, signal);
  agents_[0].propose(1, signal);
  EXPECT_EQ(agents_[1].take_verdict()->kind, Verdict::Kind::failed);
  agents_[1].offer_round(1, {});
  const auto verdict = agents_[1].take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->signal, 15);
}

TEST_F(NodeProtocolTest, SilentNodeIsLostAfterHalfAMinute) {
  form({1, 1, 1}, KeepAlive().max_attempt);
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  const auto pass = [&](int seconds, std::initializer_list<size_t> alive) {
    for (int second = 1; second <= seconds; ++second) {
      now_ += milliseconds(1000);
      for (const size_t rank : alive) agents_[rank].beat(now_);
    }
  };
  pass(40, {0, 1, 2});
  EXPECT_FALSE(agents_[0].take_verdict()) << "all are heard";
  EXPECT_FALSE(agents_[0].take_notice());
  pass(28, {0, 1});
  EXPECT_FALSE(agents_[0].take_verdict());
  // A line says that it is silent, and another one when it is back.
  const std::string silent = agents_[0].take_notice().value_or("");
  EXPECT_THAT(silent, AllOf(HasSubstr("no sign of life from node 2 (host"),
                            HasSubstr("for 10 s"), HasSubstr("after 30 s")));
  pass(1, {0, 1, 2});
  pass(1, {0, 1, 2});
  const std::string back = agents_[0].take_notice().value_or("");
  EXPECT_THAT(back, HasSubstr("is back after"));
  EXPECT_FALSE(agents_[0].take_notice());
  pass(31, {0, 1});
  const auto verdict = agents_[1].take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::failed) << "a restart may follow";
  EXPECT_EQ(verdict->node_rank, 2);
  EXPECT_THAT(verdict->text,
              AllOf(HasSubstr("node 2 (host"), HasSubstr("for 30 s")));
  EXPECT_EQ(verdict->text.find("itself"), std::string::npos);
  EXPECT_NE(verdict->exit_code, 0);
  // No agent waits for the lost node at the end.
  agents_[1].depart();
  EXPECT_TRUE(agents_[0].others_have_departed());
}

// A node that had no contact for so long that it has ended its workers comes
// back before the others have given it up.
TEST_F(NodeProtocolTest, NodeThatGaveItselfUpEndsTheRoundWhenItIsBack) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  auto again = node(2, 1, 1);
  again.id = "the second";
  agents_[1].depart();
  again.earlier = agents_[1].earlier();
  EXPECT_EQ(again.earlier.lost_round, 0);
  again.max_restarts = 0;
  const auto membership = agent(again).join();
  EXPECT_EQ(membership.node_rank, 1);
  const auto verdict = agents_[0].take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::failed);
  EXPECT_EQ(verdict->changes.restarts, 1);
  EXPECT_THAT(verdict->text, HasSubstr("had no contact for 15 s"));
}

// The others seem silent for as long as this agent itself was paused.
TEST_F(NodeProtocolTest, PauseOfTheHostOfTheStoreIsNoSilenceOfTheOthers) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  for (int pause = 0; pause < 5; ++pause) {
    agents_[1].beat(now_);
    agents_[0].beat(now_);
    now_ += std::chrono::hours(1);
    agents_[0].beat(now_);
    EXPECT_FALSE(agents_[0].take_verdict()) << pause;
  }
}

TEST_F(NodeProtocolTest, ClosedConnectionIsALostNodeAtOnce) {
  std::set<std::string> accepted;
  for (int rank = 0; rank < 3; ++rank) {
    auto one = node(3, rank, 1);
    one.hosts_store = rank == 0;
    one.connection = "192.0.2." + std::to_string(rank) + ":999";
    // Node 2 has another address here, as behind a gateway.
    if (rank < 2) accepted.insert(one.connection);
    agents_.emplace_back(store_, one, [&] { return accepted; }).join();
  }
  offer(0);
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  const auto pass = [&] {
    now_ += milliseconds(1000);
    for (auto& one : agents_) one.beat(now_);
  };
  EXPECT_FALSE(agents_[0].take_verdict());
  // The loss is reported at once: the workers may die of the same cause.
  accepted.erase("192.0.2.1:999");
  pass();
  const auto verdict = agents_[2].take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->node_rank, 1);
  EXPECT_THAT(verdict->text, HasSubstr("connection is closed"));
}

TEST_F(NodeProtocolTest, LostNodeIsReplacedInTheNextRound) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[1].beat(now_);
  for (int second = 0; second < 20; ++second) {
    agents_[0].beat(now_ += milliseconds(1000));
  }
  EXPECT_EQ(agents_[0].take_verdict()->node_rank, 1);
  agents_[0].offer_round(1, {"192.0.2.1", 4001});
  EXPECT_FALSE(agents_[0].take_plan());
  auto& replacement = agent(node(2));
  const auto membership = replacement.join();
  EXPECT_EQ(membership.node_rank, 1);
  EXPECT_EQ(membership.round, 1);
  EXPECT_FALSE(replacement.take_verdict()) << "round 0 is not its own";
  replacement.offer_round(1, {});
  EXPECT_EQ(replacement.take_plan()->round, 1);
  EXPECT_TRUE(agents_[0].take_plan());
  // The lost agent was only stopped, and comes back.
  EXPECT_EQ(agents_[1].take_verdict()->node_rank, 1);
  EXPECT_THROW(agents_[1].offer_round(1, {}), JobRefused);
  agents_[1].depart();
  EXPECT_FALSE(agents_[0].take_verdict()) << "its rank is another's";
  EXPECT_TRUE(replacement.absent_nodes().empty());
}

// A job that heals, of two nodes if nothing else is said, and spare ones.
class SpareNodeTest : public NodeProtocolTest {
 protected:
  NodeProtocol& healing_agent(std::optional<int> rank, int workers = 1,
                              int nnodes = 2) {
    auto one = node(nnodes, rank, workers);
    one.hosts_store = rank == 0;
    one.heals = true;
    one.shrinks = shrinks_;
    one.is_spare = !rank;
    one.max_restarts = 3;
    one.id = one.connection = "agent " + std::to_string(agents_.size());
    accepted_.insert(one.connection);
    return agents_.emplace_back(store_, one, [this] { return accepted_; });
  }
  // Has both nodes run, agent 2 wait as a spare one, and agent 1 lost.
  void lose_node_one(int spare_workers = 1) {
    healing_agent(0).join();
    healing_agent(1).join();
    auto& spare = healing_agent({}, spare_workers);
    EXPECT_THROW(spare.join(), RankTaken) << "the job has not begun";
    agents_[0].offer_round(0, {"192.0.2.1", 4000});
    agents_[1].offer_round(0, {});
    for (const int rank : {0, 1}) {
      EXPECT_EQ(agents_[rank].take_plan()->lost_node, "");
      agents_[rank].beat(now_);
      if (heals_) agents_[rank].report_healing();
    }
    EXPECT_THROW(spare.join(), RankTaken);
    accepted_.erase("agent 1");
    pass(1000);
  }
  void pass(int time) { agents_[0].beat(now_ += milliseconds(time)); }

  // Has three nodes of two ranks run, and node 1 lost, or nodes 1 and 2. A
  // spare one waits, if one is wanted, which is agent 3.
  void lose_one_of_three(bool with_spare = false, bool loses_two = false) {
    shrinks_ = true;
    for (const int rank : {0, 1, 2}) healing_agent(rank, 2, 3).join();
    for (const int rank : {0, 1, 2}) {
      agents_[rank].offer_round(
          0, rank == 0 ? RoundOffer{"192.0.2.1", 4000} : RoundOffer{});
    }
    for (const int rank : {0, 1, 2}) {
      ASSERT_TRUE(agents_[rank].take_plan());
      agents_[rank].beat(now_);
      if (heals_) agents_[rank].report_healing();
    }
    if (with_spare) {
      EXPECT_THROW(healing_agent({}, 2, 3).join(), RankTaken);
    }
    accepted_.erase("agent 1");
    if (loses_two) accepted_.erase("agent 2");
    pass(1000);
  }

  bool heals_ = true;
  bool shrinks_ = false;
  std::set<std::string> accepted_;
};

TEST_F(SpareNodeTest, IsNotNeededIfTheJobMayGoOnWithFewerRanks) {
  lose_one_of_three();
  const auto lost = agents_[0].take_lost_node();
  ASSERT_TRUE(lost);
  EXPECT_THAT(lost->cause, HasSubstr("was lost: its connection is closed"));
  EXPECT_EQ(lost->places, std::vector<int>({2, 3}));
  EXPECT_FALSE(agents_[0].take_lost_node());
  pass(60'000);
  EXPECT_FALSE(agents_[0].take_verdict());
  // It was only stopped, and comes back; or another node wants its rank.
  EXPECT_THROW(agents_[1].propose(0, failed(1, 7)), RankTaken);
  EXPECT_THROW(agents_[1].beat(now_), RankTaken);
  EXPECT_THROW(healing_agent(1, 2, 3).join(), RankTaken);
  agents_[0].report_success();
  EXPECT_FALSE(agents_[0].take_verdict());
  agents_[2].report_success();
  EXPECT_EQ(agents_[0].take_verdict()->kind, Verdict::Kind::succeeded);
  agents_[0].depart();
  agents_[2].depart();
  EXPECT_TRUE(agents_[0].others_have_departed());
}

TEST_F(SpareNodeTest, MayHaveARankThatWasGivenUpAtARestart) {
  lose_one_of_three();
  ASSERT_TRUE(agents_[0].take_lost_node());
  auto& spare = healing_agent({}, 2, 3);
  EXPECT_THROW(spare.join(), RankTaken);
  agents_[2].propose(0, failed(2, 1));
  ASSERT_TRUE(agents_[0].take_verdict());
  const auto membership = spare.join();
  EXPECT_EQ(membership.node_rank, 1);
  EXPECT_EQ(membership.round, 1);
}

TEST_F(SpareNodeTest, IsNotNeededForANodeWhoseWorkersWereGivenUp) {
  lose_one_of_three();
  ASSERT_TRUE(agents_[0].take_lost_node());
  agents_[2].report_given_up();
  accepted_.erase("agent 2");
  pass(1000);
  EXPECT_FALSE(agents_[0].take_lost_node());
  EXPECT_FALSE(agents_[0].take_verdict());
  agents_[0].report_success();
  EXPECT_EQ(agents_[0].take_verdict()->kind, Verdict::Kind::succeeded);
}

// A bug: the agent still had to write another key, and the job waited for that.
TEST_F(SpareNodeTest, IsNotNeededForANodeThatIsLostOnceItHasSaidSo) {
  lose_one_of_three();
  ASSERT_TRUE(agents_[0].take_lost_node());
  store_.set("lockstep/round/0/given_up/2", "1");
  accepted_.erase("agent 2");
  pass(1000);
  EXPECT_FALSE(agents_[0].take_lost_node());
  EXPECT_FALSE(agents_[0].take_verdict());
  agents_[0].report_success();
  EXPECT_EQ(agents_[0].take_verdict()->kind, Verdict::Kind::succeeded);
}

TEST_F(SpareNodeTest, DoesNotTakeThePlaceOfWorkersThatWereGivenUp) {
  lose_one_of_three();
  ASSERT_TRUE(agents_[0].take_lost_node());
  agents_[2].report_given_up();
  auto& spare = healing_agent({}, 2, 3);
  EXPECT_THROW(spare.join(), RankTaken);
  accepted_.erase("agent 2");
  pass(1000);
  EXPECT_THROW(spare.join(), RankTaken);
  pass(60'000);
  EXPECT_FALSE(agents_[0].take_verdict());
}

TEST_F(SpareNodeTest, TakesThePlaceOfOneOfTwoAndTheOtherIsGivenUp) {
  lose_one_of_three(/*with_spare=*/true, /*loses_two=*/true);
  EXPECT_EQ(agents_[3].join().node_rank, 1);
  agents_[3].offer_round(0, {});
  const auto lost = agents_[0].take_lost_node();
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->places, std::vector<int>({4, 5}));
  pass(60'000);
  EXPECT_FALSE(agents_[0].take_verdict());
}

TEST_F(SpareNodeTest, IsNotFreeWhileItTakesARank) {
  lose_one_of_three(/*with_spare=*/true);
  agents_[3].join();
  store_.set("lockstep/spare/0", "agent 3");  // which it has just removed
  accepted_.erase("agent 2");
  pass(1000);
  const auto lost = agents_[0].take_lost_node();
  ASSERT_TRUE(lost) << "the same spare node was to take this place, too";
  EXPECT_EQ(lost->places, std::vector<int>({4, 5}));
}

// It has not taken the place of a lost one when the job ends.
TEST_F(SpareNodeTest, IsAwaitedThoughALostNodeWaitsForIt) {
  lose_node_one();
  agents_[0].propose(0, failed(0, 1));
  ASSERT_TRUE(agents_[0].take_verdict());
  agents_[0].depart();
  EXPECT_FALSE(agents_[0].others_have_departed());
}

TEST_F(SpareNodeTest, IsNeededIfNoRankIsLeft) {
  lose_one_of_three();
  ASSERT_TRUE(agents_[0].take_lost_node());
  agents_[0].report_given_up();
  accepted_.erase("agent 2");
  pass(1000);
  EXPECT_FALSE(agents_[0].take_lost_node());
  const auto verdict = agents_[0].take_verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::failed);
  EXPECT_THAT(verdict->text, HasSubstr("is not healed: no rank is left"));
}

TEST_F(SpareNodeTest, WhoseAbsenceEndsARoundDoesNotHideItsHealings) {
  lose_node_one();
  agents_[0].note_healings(1);
  pass(11'000);
  EXPECT_EQ(agents_[0].take_verdict()->changes.restarts, 2);
  agents_[0].offer_round(1, {"192.0.2.1", 4001});
  agents_[0].propose(1, failed(0, 1));
  EXPECT_EQ(agents_[0].take_verdict()->changes.restarts, 3);
}

TEST_F(SpareNodeTest, CannotBeLeftOutOnceTheWorkersOfANodeHaveEnded) {
  lose_one_of_three();
  ASSERT_TRUE(agents_[0].take_lost_node());
  agents_[0].report_success();
  accepted_.erase("agent 2");
  pass(1000);
  EXPECT_FALSE(agents_[0].take_lost_node());
  EXPECT_THAT(
      agents_[0].take_verdict()->text,
      HasSubstr("this is not healed: the workers of a node have ended"));
}

TEST_F(SpareNodeTest, CannotBeLeftOutIfARankCannotBeHealed) {
  heals_ = false;
  lose_one_of_three();
  EXPECT_FALSE(agents_[0].take_lost_node());
  EXPECT_THAT(agents_[0].take_verdict()->text,
              HasSubstr("this is not healed: a rank has not said"));
}

TEST_F(SpareNodeTest, TakesThePlaceOfALostOneInTheRoundThatRuns) {
  lose_node_one();
  EXPECT_THAT(agents_[0].take_notice().value_or(""),
              AllOf(HasSubstr("node 1 ("),
                    HasSubstr("connection is closed; a spare node takes its "
                              "place")));
  auto& spare = agents_[2];
  const auto membership = spare.join();
  EXPECT_EQ(membership.node_rank, 1);
  EXPECT_EQ(membership.round, 0);
  spare.offer_round(0, {});
  const auto plan = spare.take_plan();
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->place.first_rank, 1);
  EXPECT_EQ(plan->place.world_size, 2);
  EXPECT_THAT(plan->lost_node, HasSubstr("was lost: its connection is closed"));
  spare.beat(now_);
  pass(60'000);
  EXPECT_FALSE(agents_[0].take_verdict());
  // The lost agent was only stopped, and comes back.
  EXPECT_THROW(agents_[1].propose(0, failed(1, 7)), RankTaken);
  EXPECT_THROW(agents_[1].beat(now_), RankTaken);
  EXPECT_FALSE(agents_[0].take_verdict());
  for (const int rank : {0, 2}) agents_[rank].report_success();
  EXPECT_EQ(agents_[0].take_verdict()->kind, Verdict::Kind::succeeded);
}

TEST_F(SpareNodeTest, IsReplacedToo) {
  lose_node_one();
  auto& second = healing_agent({});
  agents_[2].join();
  agents_[2].offer_round(0, {});
  ASSERT_TRUE(agents_[2].take_plan());
  agents_[2].beat(now_);
  EXPECT_THROW(second.join(), RankTaken);
  pass(1000);
  accepted_.erase("agent 2");
  pass(1000);
  EXPECT_FALSE(agents_[0].take_verdict());
  EXPECT_EQ(second.join().node_rank, 1);
}

TEST_F(SpareNodeTest, MustComeSoon) {
  lose_node_one();
  pass(9000);
  EXPECT_FALSE(agents_[0].take_verdict());
  pass(2000);
  EXPECT_THAT(agents_[0].take_verdict()->text,
              HasSubstr("was lost: its connection is closed, and no spare node "
                        "took its place"));
}

TEST_F(SpareNodeTest, IsOfUseAtARestartIfARankCannotBeHealed) {
  heals_ = false;
  lose_node_one();
  EXPECT_EQ(agents_[0].take_verdict()->node_rank, 1);
  const auto membership = agents_[2].join();
  EXPECT_EQ(membership.node_rank, 1);
  EXPECT_EQ(membership.round, 1);
}

TEST_F(SpareNodeTest, WithWorkersThatNoNodeHasIsRefused) {
  healing_agent(0).join();
  healing_agent(1).join();
  agents_[0].offer_round(0, {"192.0.2.1", 4000});
  agents_[1].offer_round(0, {});
  EXPECT_THAT(refusal(healing_agent({}, 2)),
              HasSubstr("nodes of this job have 1 worker of role default, and "
                        "this spare node has 2 workers"));
}

TEST_F(SpareNodeTest, WithOtherWorkersThanTheLostOneIsRefused) {
  healing_agent(0, 2).join();
  healing_agent(1).join();
  auto& spare = healing_agent({}, 2);
  agents_[0].offer_round(0, {"192.0.2.1", 4000});
  agents_[1].offer_round(0, {});
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(agents_[rank].take_plan());
    agents_[rank].beat(now_);
    agents_[rank].report_healing();
  }
  EXPECT_THROW(spare.join(), RankTaken);
  accepted_.erase("agent 1");
  pass(1000);
  spare.join();
  spare.offer_round(0, {});
  EXPECT_THROW(spare.take_plan(), JobRefused);
}

// The first spare one offers when the other has its rank and no offer yet.
TEST_F(SpareNodeTest, TwoTakeThePlacesOfTwoLostAtOnce) {
  for (const int rank : {0, 1, 2}) {
    healing_agent(rank, /*workers=*/1, /*nnodes=*/3).join();
  }
  offer(0);
  for (auto& one : agents_) {
    ASSERT_TRUE(one.take_plan());
    one.beat(now_);
    one.report_healing();
  }
  for (int spare = 0; spare < 2; ++spare) {
    EXPECT_THROW(healing_agent({}, /*workers=*/1, /*nnodes=*/3).join(),
                 RankTaken);
  }
  accepted_.erase("agent 1");
  accepted_.erase("agent 2");
  pass(1000);
  for (const int spare : {3, 4}) agents_[spare].join();
  for (const int spare : {3, 4}) {
    agents_[spare].offer_round(0, {});
    const auto plan = agents_[spare].take_plan();
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->place.first_rank, spare - 2);
  }
  EXPECT_FALSE(agents_[0].take_verdict());
}

// The store is lost with its host, node 0 of three, while a round runs whose
// workers can go on. The others meet at another store.
class MovedRoundTest : public SpareNodeTest {
 protected:
  MovedRoundTest() {
    for (const int rank : {0, 1, 2}) {
      auto one = node(3, rank == 0 ? std::optional(0) : std::nullopt, 1);
      one.hosts_store = rank == 0;
      one.heals = true;
      one.max_restarts = 3;
      nodes_.push_back(one);
      agent(one).join();
    }
    offer(0);
    for (auto& one : agents_) {
      EXPECT_TRUE(one.take_plan());
      EXPECT_THAT(one.name_of_store_host(), HasSubstr("node 0 ("));
      rounds_.push_back(one.running_round());
    }
    nodes_[1].run_id = nodes_[2].run_id = agents_[1].run_id();
    agents_.clear();
    keys_->values.clear();
    keys_->counters.clear();
  }

  // The agent of node `rank` comes to the next store. `generation`: the last
  // one of its workers, or nothing if they have been ended.
  NodeProtocol& move(int rank, std::optional<int> generation,
                     bool hosts_store = false) {
    NodeDescription one = nodes_[static_cast<size_t>(rank)];
    one.hosts_store = hosts_store;
    one.connection = "agent " + std::to_string(agents_.size());
    accepted_.insert(one.connection);
    if (generation) {
      one.earlier.running = rounds_[static_cast<size_t>(rank)];
      one.earlier.running->loss = "node 0 was lost";
      one.earlier.running->generation = *generation;
    } else {
      one.earlier.count = 1;
      one.earlier.lost_round = 0;
    }
    return agents_.emplace_back(store_, one, [this] { return accepted_; });
  }

  NodeProtocol& moved_spare() {
    NodeDescription one = node(3, {}, 1);
    one.heals = one.is_spare = one.earlier.waited = true;
    one.max_restarts = 3;
    one.run_id = nodes_[1].run_id;
    one.connection = "agent " + std::to_string(agents_.size());
    accepted_.insert(one.connection);
    return agents_.emplace_back(store_, one, [this] { return accepted_; });
  }

  std::vector<NodeDescription> nodes_;
  std::vector<std::optional<RunningRound>> rounds_;
};

TEST_F(MovedRoundTest, GoesOnWithASpareNodeInThePlaceOfTheHost) {
  EXPECT_FALSE(rounds_[0]) << "the store is not lost for its host";
  auto& spare = moved_spare();
  EXPECT_THROW(spare.join(), RankTaken) << "no node has come";
  auto& second = move(2, 4);
  EXPECT_EQ(second.join().node_rank, 2) << "it keeps its rank";
  EXPECT_TRUE(second.runs());
  EXPECT_THROW(spare.join(), RankTaken) << "node 1 has not come";
  auto& host = move(1, 3, /*hosts_store=*/true);
  EXPECT_EQ(host.join().node_rank, 1);
  EXPECT_TRUE(host.runs());
  host.beat(now_ += milliseconds(1000));
  EXPECT_EQ(spare.join().node_rank, 0);
  spare.offer_round(0, {});
  const auto plan = spare.take_plan();
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->lost_node, "node 0 was lost");
  EXPECT_EQ(plan->generation, 4);
  EXPECT_EQ(plan->place.world_size, 3);
  spare.beat(now_);
  host.beat(now_ += milliseconds(60'000));
  for (NodeProtocol* one : {&host, &second, &spare}) {
    EXPECT_FALSE(one->take_verdict());
  }
  for (NodeProtocol* one : {&host, &second, &spare}) one->report_success();
  EXPECT_EQ(host.take_verdict()->kind, Verdict::Kind::succeeded);
}

TEST_F(MovedRoundTest, GoesOnOnceMore) {
  auto& host = move(1, 1, /*hosts_store=*/true);
  auto& other = move(2, 1);
  for (NodeProtocol* one : {&host, &other}) one->join();
  other.beat(now_);
  host.beat(now_ += milliseconds(1000));
  auto& first = moved_spare();
  EXPECT_EQ(first.join().node_rank, 0);
  first.offer_round(0, {});
  ASSERT_TRUE(first.take_plan());
  first.beat(now_);
  auto& second = moved_spare();
  EXPECT_THROW(second.join(), RankTaken);
  host.beat(now_ += milliseconds(1000));
  accepted_.erase("agent 1");
  host.beat(now_ += milliseconds(1000));
  EXPECT_FALSE(host.take_verdict());
  EXPECT_EQ(second.join().node_rank, 2);
  EXPECT_THAT(other.name_of_store_host(), HasSubstr("node 1 ("));
  EXPECT_EQ(other.running_round()->lost_node, 1);
}

TEST_F(MovedRoundTest, EndsIfANodeDoesNotCome) {
  auto& host = move(1, 0, /*hosts_store=*/true);
  host.join();
  host.beat(now_ += milliseconds(5000));
  EXPECT_FALSE(host.take_verdict());
  auto& spare = moved_spare();
  EXPECT_THROW(spare.join(), RankTaken);
  host.beat(now_ += milliseconds(6000));
  EXPECT_EQ(host.take_verdict()->text,
            "node 0 was lost, and node 2 has not come to the next store");
  EXPECT_EQ(spare.join().round, 1);
}

TEST_F(MovedRoundTest, EndsIfNobodyTakesThePlaceOfTheHost) {
  auto& host = move(1, 0, /*hosts_store=*/true);
  host.join();
  move(2, 0).join();
  host.beat(now_ += milliseconds(1000));
  host.beat(now_ += milliseconds(11'000));
  EXPECT_EQ(host.take_verdict()->text,
            "node 0 was lost, and no spare node took its place");
}

TEST_F(MovedRoundTest, EndsIfANodeHasEndedItsWorkers) {
  auto& host = move(1, 0, /*hosts_store=*/true);
  host.join();
  EXPECT_EQ(move(2, nullopt).join().round, 1);
  EXPECT_THAT(host.take_verdict()->text, HasSubstr("had no contact"));
}

TEST_F(MovedRoundTest, IsOverIfThatNodeComesFirst) {
  auto& host = move(2, nullopt, /*hosts_store=*/true);
  EXPECT_EQ(host.join().round, 1);
  auto& spare = moved_spare();
  EXPECT_THROW(spare.join(), RankTaken) << "node 1 may want its rank";
  auto& other = move(1, 0);
  EXPECT_EQ(other.join().round, 1);
  EXPECT_FALSE(other.runs());
  EXPECT_EQ(spare.join().round, 1);
}

// Such a node could take the rank of one that has not come yet.
TEST_F(MovedRoundTest, ANewNodeComesAfterTheOthers) {
  auto& host = move(1, 0, /*hosts_store=*/true);
  host.join();
  auto one = node(3, nullopt, 1);
  one.heals = true;
  one.max_restarts = 3;
  auto& replacement = agent(one);
  EXPECT_THROW(replacement.join(), RankTaken);
  move(2, 0).join();
  host.beat(now_ += milliseconds(1000));
  EXPECT_EQ(replacement.join().node_rank, 0);
}

// A node comes while a round ends, before it knows that.
TEST_F(NodeProtocolTest, AVerdictIsGivenOnceAlsoBeforeTheOffer) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[1].depart();
  auto& replacement = agent(node(2));
  EXPECT_EQ(replacement.join().round, 0);
  agents_[0].propose(0, failed(1, 7));
  EXPECT_TRUE(replacement.take_verdict());
  replacement.offer_round(0, {});
  EXPECT_FALSE(replacement.take_verdict());
}

// A bug: the host of the store left before a spare node had read how the job
// has ended, and the spare node looked for the store for 600 s.
TEST_F(SpareNodeTest, IsAwaitedUntilItKnowsHowTheJobHasEnded) {
  healing_agent(0).join();
  healing_agent(1).join();
  auto& spare = healing_agent({});
  EXPECT_THROW(spare.join(), RankTaken);
  agents_[0].offer_round(0, {"192.0.2.1", 4000});
  agents_[1].offer_round(0, {});
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(agents_[rank].take_plan());
    agents_[rank].report_success();
  }
  for (const int rank : {1, 0}) {
    ASSERT_TRUE(agents_[rank].take_verdict());
    agents_[rank].depart();
  }
  EXPECT_THROW(spare.join(), JobClosed);
  EXPECT_FALSE(agents_[0].others_have_departed());
  EXPECT_EQ(spare.last_verdict().kind, Verdict::Kind::succeeded);
  EXPECT_TRUE(agents_[0].others_have_departed());
}

TEST_F(NodeProtocolTest, PausedNodeThatNobodyReplacedTakesPartAgain) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[1].beat(now_);
  for (int second = 0; second < 20; ++second) {
    agents_[0].beat(now_ += milliseconds(1000));
  }
  for (auto& one : agents_) EXPECT_EQ(one.take_verdict()->node_rank, 1);
  offer(1);
  for (auto& one : agents_) EXPECT_TRUE(one.take_plan());
}

// The loss uses up no restart besides the one for the failure of its peers.
TEST_F(NodeProtocolTest, NodeLostBetweenTwoRoundsCostsNoRound) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[1].beat(now_);
  agents_[0].propose(0, failed(0, 7));
  agents_[0].take_verdict();
  agents_[0].offer_round(1, {"192.0.2.1", 4001});
  for (int second = 0; second < 20; ++second) {
    agents_[0].beat(now_ += milliseconds(1000));
  }
  EXPECT_FALSE(agents_[0].take_verdict());
  EXPECT_THAT(agents_[0].take_notice().value_or(""),
              HasSubstr("no sign of life from node 1 ("));
  EXPECT_THAT(agents_[0].take_notice().value_or(""),
              AllOf(HasSubstr("node 1 ("), HasSubstr("was lost")));
  auto& replacement = agent(node(2, 1));
  replacement.join();
  replacement.offer_round(1, {});
  EXPECT_TRUE(agents_[0].take_plan());
}

// The lost node made its offer earlier than the host of the store, which was
// still stopping its workers.
TEST_F(NodeProtocolTest, RoundDoesNotBeginWithANodeThatWasLostAfterItsOffer) {
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agents_[1].beat(now_);
  agents_[0].propose(0, failed(0, 7));
  for (auto& one : agents_) one.take_verdict();
  agents_[1].offer_round(1, {});
  for (int second = 0; second < 20; ++second) {
    agents_[0].beat(now_ += milliseconds(1000));
  }
  agents_[0].offer_round(1, {"192.0.2.1", 4001});
  EXPECT_FALSE(agents_[0].take_plan());
  auto& replacement = agent(node(2, 1));
  EXPECT_EQ(replacement.join().round, 1);
  replacement.offer_round(1, {});
  EXPECT_TRUE(agents_[0].take_plan());
  EXPECT_TRUE(replacement.take_plan());
}

// A bug: the loss of a node that waited for a replacement of another used a
// restart.
TEST_F(NodeProtocolTest, NodeLostAfterItsOfferForALaterRoundCostsNoRestart) {
  form({1, 1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  for (auto& one : agents_) one.beat(now_);
  agents_[0].propose(0, failed(0, 7));
  for (auto& one : agents_) one.take_verdict();
  agents_[0].offer_round(1, {"192.0.2.1", 4001});
  agents_[1].offer_round(1, {});
  for (int second = 0; second < 20; ++second) {
    agents_[0].beat(now_ += milliseconds(1000));
  }
  EXPECT_FALSE(agents_[0].take_verdict());
  EXPECT_TRUE(agents_[0].take_notice());
  EXPECT_TRUE(agents_[0].take_notice());
  auto& first = agent(node(3, 1));
  first.join();
  auto& second = agent(node(3, 2));
  second.join();
  second.offer_round(1, {});
  EXPECT_FALSE(agents_[0].take_plan()) << "it has the offer of the lost node 1";
  first.offer_round(1, {});
  EXPECT_TRUE(agents_[0].take_plan());
}

TEST_F(NodeProtocolTest, NodeThatDeclinesEndsAWaitAndNoJobThatRuns) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::declined;
  verdict.exit_code = 127;
  verdict.text = "node 2 (here): no program";
  auto host = node(3, 0);
  host.hosts_store = true;
  auto& first = agent(host);
  first.join();
  first.offer_round(0, {"192.0.2.1", 4000});
  agent(node(3, 2)).decline(verdict);
  EXPECT_EQ(first.take_verdict()->exit_code, 127);
  first.depart();
  EXPECT_FALSE(first.others_have_departed()) << "node 1 has yet to be told";
  auto& late = agent(node(3, 1));
  late.join();
  late.offer_round(0, {});
  EXPECT_EQ(late.take_verdict()->text, verdict.text);
  late.depart();

  keys_->values.clear();
  keys_->counters.clear();
  agents_.clear();
  form({1, 1});
  for (auto& one : agents_) ASSERT_TRUE(one.take_plan());
  agent(node(2, 1)).decline(verdict);
  EXPECT_FALSE(agents_[0].take_verdict());
}

TEST_F(NodeProtocolTest, HostOfTheStoreStaysUntilAllHaveDeparted) {
  form({1, 1, 1});
  EXPECT_EQ(agents_[2].name_of_store_host(), agents_[2].name_of(0));
  agents_[0].propose(0, failed(0, 7));  // no restart is left
  for (auto& one : agents_) one.take_verdict();
  agents_[1].depart();
  EXPECT_FALSE(agents_[0].others_have_departed());
  agents_[2].depart();
  EXPECT_TRUE(agents_[0].others_have_departed());
}

TEST_F(NodeProtocolTest, StoreOfAJobThatEndsIsNotJoined) {
  form({1, 1});
  agents_[0].depart();
  EXPECT_THROW(agent(node(2, 1)).join(), JobClosed);
}

TEST_F(NodeProtocolTest, ForeignRecordsAreRefusedNotBelieved) {
  for (const char* job :
       {"", "no json", "[]", "{}", R"({"version":1})",
        R"({"version":1,"nnodes":2,"max_restarts":0,"run_id":"x"})"}) {
    store_.set("lockstep/job", job);
    EXPECT_THROW(agent(node(2, 0)).join(), ForeignRecord) << job;
  }
  for (const char* nodes :
       {R"("nnodes":"2","min_nodes":2)", R"("nnodes":-2,"min_nodes":-2)",
        R"("nnodes":2e300,"min_nodes":2)", R"("nnodes":2,"min_nodes":3)",
        R"("nnodes":2,"min_nodes":0)", R"("nnodes":2)"}) {
    store_.set("lockstep/job",
               std::string(R"({"version":3,"max_restarts":0,"heals":0,)") +
                   nodes +
                   R"(,"max_membership_changes":-1,"run_id":"x",)"
                   R"("first_round":0,"restarts":0,"membership_changes":0,)"
                   R"("first_agent":"x"})");
    EXPECT_THROW(agent(node(2, 0)).join(), ForeignRecord) << nodes;
  }
  keys_->values.clear();
  agents_.clear();
  form({1, 1});
  const auto plan = [](const std::string& nodes) {
    return R"({"master_addr":"","master_port":1,"nodes":)" + nodes + "}";
  };
  const auto one = [](int first) {
    return R"({"first":)" + std::to_string(first) +
           R"(,"count":1,"nproc_per_node":1,"role":"default"})";
  };
  const std::string good = one(0) + "," + one(1);
  for (const std::string& nodes :
       {std::string("{}"), std::string("[1,2]"), "[" + one(0) + "]",
        "[" + good + "," + one(0) + "]", "[" + one(0) + "," + one(2) + "]",
        std::string(
            R"([{"first":0,"count":2,"nproc_per_node":100000,"role":"x"}])"),
        std::string(R"([{"count":2,"nproc_per_node":1,"role":"x"}])"),
        std::string(R"([{"first":0,"count":3,"nproc_per_node":1,"role":"x"}])"),
        std::string(
            R"([{"first":0,"count":0,"nproc_per_node":1,"role":"x"}])")}) {
    store_.set("lockstep/round/0/plan", plan(nodes));
    EXPECT_THROW(agents_[0].take_plan(), ForeignRecord) << nodes;
  }
  store_.set("lockstep/round/0/plan", plan("[" + good + "]"));
  EXPECT_TRUE(agents_[0].take_plan());
  store_.set("lockstep/round/0/verdict",
             R"({"kind":9,"node_rank":0,"exit_code":0,"signal":0,"text":"",)"
             R"("restarts":0,"membership_changes":0})");
  EXPECT_THROW(agents_[0].take_verdict(), ForeignRecord);
}

TEST_F(NodeProtocolTest, OddNamesOfRunAndRoleAreTheSameForAll) {
  for (int rank = 0; rank < 2; ++rank) {
    auto one = node(2, rank, 3);
    one.run_id = "tab\there \xff" + std::string(5000, 'x');
    one.role = "a\nrole \xfe";
    agent(one).join();
  }
  offer(0);
  const auto plan = agents_[1].take_plan();
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->place.first_role_rank, 3);
  EXPECT_EQ(plan->place.role_world_size, 6);
}

TEST_F(NodeProtocolTest, TextsOfOthersHoldNoControlCharacters) {
  form({1, 1});
  auto verdict = failed(1, 3);
  verdict.text = "two\nlines \x1b[31m and \xff";
  agents_[1].propose(0, verdict);
  const auto text = agents_[0].take_verdict()->text;
  EXPECT_THAT(text, HasSubstr("two lines "));
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace lockstep::internal::testing

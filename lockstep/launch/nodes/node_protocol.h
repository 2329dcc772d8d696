#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/launch/nodes/agent_store.h"
#include "lockstep/launch/nodes/elastic_rules.h"
#include "lockstep/launch/nodes/node_records.h"
#include "lockstep/launch/nodes/round.h"
#include "lockstep/launch/process/awake_clock.h"
#include "lockstep/launch/watch/worker_failure.h"

namespace lockstep::internal {

// Returns an id that differs from every other one.
std::string random_id();

// After so long a silence of a node, or of the store, the user is told.
inline constexpr std::chrono::milliseconds kLongSilence{10'000};

// How agents notice that another one has died. The names are torchrun's.
struct KeepAlive {
  std::chrono::milliseconds interval{5000};  // between two signs of life
  int max_attempt = 6;                       // torchrun's default is 3

  // An agent that shows no sign of life for this long is lost: it was stopped,
  // or the network is cut.
  std::chrono::milliseconds allowance() const { return interval * max_attempt; }
  // The longest step of an AwakeClock that is ticked at least once a second.
  std::chrono::milliseconds longest_step() const {
    return std::min<std::chrono::milliseconds>(std::chrono::seconds(2),
                                               allowance() / 2);
  }
};

// Returns what to add to a message that another node is gone if the agent of
// `name` itself did not run for a while just before: "; the agent of node 1
// (its host) itself did not run for 20 s, ...". Otherwise returns an empty
// text.
std::string own_pause(const AwakeClock& awake, const KeepAlive& keep_alive,
                      const std::string& name);

// A round whose workers go on when the store was lost with its host, until
// another node has the place of that one.
struct RunningRound {
  std::string plan{};  // as it was in the store
  int node_rank = -1;
  int lost_node = -1;  // the rank of the host of the store
  std::string loss{};  // why it is gone, in one line
  int generation = 0;  // the last one of this node's workers
};

// An agent's knowledge of the job from the store at which it met before, if
// that store was lost.
struct EarlierRounds {
  int count = 0;  // the number of the next round
  ChangeCount changes{};
  int nodes = 0;  // that took part in the last one
  // The place of this node, and the round in which it had it; see Candidate.
  int last_place = -1;
  int last_round = -1;
  // The round whose workers ran here when the store was lost, and have been
  // ended since; -1 if none ran.
  int lost_round = -1;
  // If it is set, round `count` runs, and is to go on.
  std::optional<RunningRound> running{};
  bool waited = false;  // this spare node waited for a rank

  // Whether this agent has taken part at another store.
  bool any() const { return count > 0 || running || waited; }
};

// An agent's description of itself for the others. All agents of a job must
// agree on the numbers of nodes, on the limits, on --heal and, if they give
// one, on the run id.
struct NodeDescription {
  int nnodes = 1;  // at most
  // At least. If it is unset, it is `nnodes`, so that their number is fixed.
  std::optional<int> min_nodes{};
  std::optional<int> node_rank{};  // unset means the lowest free rank
  int nproc_per_node = 1;
  std::string role = "default";
  int max_restarts = 0;
  bool heals = false;
  bool shrinks = false;  // --heal=shrink; only with `heals`
  // Takes no rank before the job has begun, and then the first that is free:
  // that of a node that was lost. Not if nodes may come and go.
  bool is_spare = false;
  std::optional<int> max_membership_changes{};  // unset means without limit
  // If it is unset, it is the first agent's.
  std::optional<std::string> run_id{};
  std::string host{};  // for messages
  pid_t pid = 0;
  // Distinguishes this agent from others, since containers may share host name
  // and pid. An agent that lost the store and joins again keeps its rank by
  // this id.
  std::string id = random_id();
  bool hosts_store = false;
  // The name by which the host of the store knows its connection: `id`, or at a
  // store that does not know its agents the name of the connection
  // (store_connections.h); empty if not known.
  std::string connection{};
  KeepAlive keep_alive{};
  ElasticOptions elastic_options{};  // those of the host of the store count
  EarlierRounds earlier{};

  int fewest() const { return min_nodes.value_or(nnodes); }
  // Whether nodes may come and go.
  bool elastic() const { return fewest() < nnodes; }
  ChangeLimits limits() const { return {max_restarts, max_membership_changes}; }
};

struct Membership {
  int node_rank = 0;
  std::string run_id{};
  int round = 0;          // the one that is being formed or runs
  ChangeCount changes{};  // before that round
};

// The offer of a node for one round.
struct RoundOffer {
  // Where rank 0 opens the workers' store, if this node has rank 0. If the
  // number of nodes is fixed, that is node rank 0, and no other gives these.
  // If it is empty, rank 0 opens it on the host of the agents' store, which
  // each node reaches by the address that it was given for that store.
  std::string master_addr{};
  int master_port = 0;
};

// Thrown if this agent may not join. what() is one line that names both sides.
class JobRefused : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Thrown if the rank that this agent wants (or, if it wants none, every rank)
// is held by an agent that takes part in a job that runs and may be restarted.
// The holder may be dead but not given up yet. So the caller tries again for
// KeepAlive::allowance() and one interval; only after that it is a refusal.
// offer_round() says when it throws this.
class RankTaken : public JobRefused {
 public:
  using JobRefused::JobRefused;
};

// Thrown if the store belongs to a job that is ending. The store of the next
// job may come soon: try again.
class JobClosed : public std::runtime_error {
 public:
  JobClosed() : std::runtime_error("the job at this store has ended") {}
};

// Writes and reads what the agents of a job keep in their store
// (docs/internals/launcher.md, "Between the nodes"). A round is a rendezvous
// round: it agrees on the attempt of the same number, and its verdict says how
// that attempt ended. Round 0 is the start, each further one a restart.
//
// If nodes may come and go (NodeDescription::elastic()), a node rank is what a
// node takes when it joins; its place among the nodes of a round is in the
// round's plan, and may be another in the next round. The host of the store
// decides which nodes take part (elastic_rules.h). Its part of this class is in
// store_host.cpp.
//
// If a node of a job that heals is lost while all workers can be healed and a
// spare node waits, the round goes on: the spare node takes the rank and the
// plan of the lost one. If no spare node waits, and the job may go on with
// fewer ranks, the lost one is given up until the round ends. An agent that was
// given up and lives must not act for its node any more.
//
// No call waits for another node: the owner asks again and again
// (job_member.h). For one thread. Every member throws AgentStoreError if the
// store is lost, ForeignRecord if it holds a record that no agent of this
// version wrote.
class NodeProtocol {
 public:
  using Clock = std::chrono::steady_clock;
  // How long another node may take to come to the place of a lost one.
  static constexpr std::chrono::seconds kReplacedWithin{10};
  // Returns the NodeDescription::connection of all agents that are connected to
  // the store that is hosted here.
  using Connections = std::function<std::set<std::string>()>;

  NodeProtocol(AgentStore& store, NodeDescription self,
               Connections accepted = {})
      : store_(store),
        self_(std::move(self)),
        accepted_(std::move(accepted)),
        last_place_(self_.earlier.last_place),
        last_round_(self_.earlier.last_round),
        last_nodes_(self_.earlier.nodes) {
    // All nodes of the last round meet again, but for the host of the store.
    if (last_nodes_ > 0) rules_.expect(last_nodes_ - 1);
  }

  // Takes a node rank. Throws JobRefused, and then also tells the nodes that
  // still wait for others; RankTaken; JobClosed. A spare node gets RankTaken
  // until it may take a rank. With EarlierRounds::running this node takes part
  // in that round without another offer, and runs() is true, unless the round
  // has ended by now, or another node has ended its workers.
  Membership join();
  // Returns how the job has ended, for a spare node that got JobClosed. The
  // host of the store waits until then (others_have_departed()).
  Verdict last_verdict();
  // Waits until a rank may have become free for this spare node, or the job has
  // ended, at most for `allowed` or until `wake_fd` is readable.
  void await_free_rank(std::chrono::milliseconds allowed, int wake_fd);
  // Ends the wait of the other nodes with `verdict`. For a node that cannot
  // take part; called instead of join(). Does not disturb a job that runs.
  // Throws JobClosed.
  void decline(const Verdict& verdict);

  // Offers this node for `round`. Requires join(). Rounds are offered in order,
  // from Membership::round on. If this node was given up as lost and another
  // has its rank, throws RankTaken, so that it may join again with another
  // rank; JobRefused if it wants this one.
  void offer_round(int round, const RoundOffer& offer);
  // Returns the plan of this node once the round has begun, and only once;
  // nothing if the round has begun without this node. Throws JobRefused if this
  // node has another number of workers or another role than the lost one whose
  // place it has taken.
  std::optional<RoundPlan> take_plan();
  // Returns true once for each round that has begun without this node.
  bool take_exclusion();
  // The round that was offered last; before the first offer, the one that
  // join() found.
  int round() const { return round_; }
  // Returns the ranks of the nodes that have not offered this round, or were
  // lost after that.
  std::vector<int> absent_nodes();
  // Whether the round has begun and has no verdict yet, as far as this node
  // knows.
  bool runs() const { return plan_given_ && !verdict_given_; }
  bool job_ended() const { return job_ended_; }
  // Whether nodes that wait may end a round.
  bool may_grow() const {
    const auto& limit = self_.max_membership_changes;
    return !limit || changes_.membership_changes < *limit;
  }
  const std::string& run_id() const { return run_id_; }
  // Returns what this node would bring to another store.
  EarlierRounds earlier() const;
  // Returns the round that runs, if it could go on without the host of the
  // store.
  std::optional<RunningRound> running_round() const;

  // Reports that every worker of this node has said that its training can be
  // healed, also if what only some ranks have is lost.
  void report_healing();
  // Reports that every worker of this node has returned 0; or that all were
  // given up, so that the round does not wait for this node. The round succeeds
  // once one of them holds for each node, and the first for some.
  void report_success();
  void report_given_up();
  // Asks all nodes to find out which of their workers was failing first: a
  // worker of this node has failed, but only as the echo of another failure,
  // and names these ranks.
  void ask_for_cause(const NamedRanks& named);
  // Returns what the first node said that has called ask_for_cause() in
  // round(); only once for each round.
  std::optional<NamedRanks> take_question();
  // A worker of this node has written a snapshot since take_wait() returned a
  // text.
  void report_snapshot();
  // How many generations round() has had after the first, as far as this node
  // knows: its verdict counts them.
  void note_healings(int healings) { healings_ = healings; }
  // Ends `round` with `verdict` unless the round has one already. Sets
  // Verdict::changes. Throws RankTaken if this node was given up and the round
  // goes on.
  void propose(int round, const Verdict& verdict);
  // Returns the verdict of round() once it has one, and only once for each
  // round.
  std::optional<Verdict> take_verdict();

  // See AgentStore::open_line().
  std::unique_ptr<StoreLine> open_line(const Deadline& deadline) {
    return store_.open_line(deadline);
  }

  // Waits until the members above may have something new to return, at most for
  // `allowed` or until `wake_fd` is readable.
  void await_news(std::chrono::milliseconds allowed, int wake_fd);

  // Must be called at least once a second: shows that this node lives. On the
  // host of the store it also looks for lost nodes. The rank of a lost node
  // becomes free. If the node took part in the round, the round has failed; a
  // round that is being formed without it waits for another node. If nodes may
  // come and go, the host also begins rounds, and ends them for nodes that
  // wait. Throws RankTaken as propose() does.
  void beat(Clock::time_point now);
  // Returns a line for the user about a node that was lost between two rounds;
  // each line once.
  std::optional<std::string> take_notice();
  // Returns, on the host of the store, a node that was given up; each once.
  std::optional<LostNode> take_lost_node();
  // Returns, on the host of the store, a line about nodes that wait for the
  // program's next snapshot; once for each wait.
  std::optional<std::string> take_wait();

  // Records that this node no longer needs the store. While the job goes on,
  // its rank becomes free for another node.
  void depart();
  // Returns true once every node that has joined has departed or was lost: only
  // then may the host of the store end. If a node has declined, every node of
  // the job must have departed, even one that has not joined yet: nodes that
  // come later must be told.
  bool others_have_departed();
  // Returns true once all other nodes of the round have offered the next one,
  // or if it has not begun.
  bool others_have_gone_on();
  bool declined() const { return declined_; }
  // Returns the names of the nodes that have not departed, "node 1 (its host)".
  std::string name_of_those_left();

  // Returns "node 1 (its host)", or "node 1" if that node has not joined.
  std::string name_of(int node_rank);
  // Returns the name of the node that hosts the store; empty until that node
  // has joined.
  std::string name_of_store_host();

 private:
  // The last beat of a node that has joined and has not departed.
  struct Heard {
    std::string beat;
    Clock::duration since{};  // in awake_'s time
    bool connected = false;   // its connection was among the accepted ones
    bool told = false;        // that it is silent
  };

  struct Start {
    int round = 0;
    ChangeCount changes{};  // before it
  };

  std::string own_record() const;
  void agree_on_job();
  void let_members_come_first();
  void claim_rank();
  int guess_free_rank();
  void propose_plan();
  Start current_round();
  bool has_begun();
  void write_offer(const RoundOffer& offer, int generation);
  std::vector<NodeRun> read_members(const StoreRecord& plan);
  void resume(const RunningRound& running);
  void gather_members(Clock::time_point now);
  void keep_members(Clock::time_point now, bool looks);
  void form_round(Clock::time_point now, bool looks);
  void look_at_members(Clock::time_point now);
  void let_in(const std::vector<int>& waiting, Clock::time_point now);
  void note_failing_node(const Verdict& verdict);
  bool is_member(int node_rank) const;
  void end_forming_round(int round, const Verdict& verdict);
  void wait_as_spare();
  void wait_for_members();
  void remove_spare_key();
  std::set<std::string> spares();  // the connections of those that wait
  int free_spares();
  bool was_given_up(int node_rank);
  int64_t count_given_up();
  void propose_success();
  bool may_go_on_without(int node_rank, std::string& text);
  void go_on_without(int node_rank, const std::string& text);
  std::vector<int> places_of(int node_rank) const;
  void free_ranks_given_up();
  void look_for_replacements(Clock::time_point now);
  void require_own_rank();
  [[noreturn]] void refuse_workers(const std::string& of_others) const;
  [[noreturn]] void refuse(const std::string& reason);
  [[noreturn]] void refuse_rank(const std::string& reason);
  void look_for_lost_nodes(Clock::time_point now);
  // Returns why the node is lost; nothing while it lives.
  std::optional<std::string> loss_of(int node_rank,
                                     const std::set<std::string>& accepted);
  void note_silence(int node_rank, Heard& heard, bool ends);
  void end_lost_round(Start& start);
  void give_up(int node_rank, const std::string& loss, Clock::time_point now);
  void fail_round(int node_rank, const std::string& text);
  void forget(int node_rank);
  void vacate(int node_rank);

  AgentStore& store_;
  NodeDescription self_;
  Connections accepted_;
  // As the first agent said.
  bool job_goes_on_ = false;  // with a round that runs
  int job_nnodes_ = 1;
  int job_fewest_ = 1;
  int first_round_ = 0;
  std::string run_id_;
  int node_rank_ = -1;
  int round_ = 0;
  bool offered_ = false;
  ChangeCount changes_{};       // before round_
  ChangeCount next_changes_{};  // after its verdict
  bool came_late_ = false;      // this node offered when the round had begun
  bool plan_given_ = false;     // take_plan() has seen it
  std::vector<int> members_{};  // node ranks by place; empty before the plan
  std::vector<int> workers_{};  // of each of them
  std::string plan_{};          // of the round; empty before take_plan()
  int store_host_ = -1;         // its rank, once it is known
  bool excluded_ = false;       // from the round; not told yet
  int last_place_;
  int last_round_;
  int last_nodes_;  // in the last round that has begun
  bool question_given_ = false;
  bool verdict_given_ = false;
  bool job_ended_ = false;
  bool declined_ = false;  // by the last verdict, or by this node
  int64_t beats_ = 0;
  Clock::time_point next_beat_{};
  Clock::time_point last_beat_{};  // the last call of beat()
  Clock::time_point next_look_{};
  AwakeClock awake_{self_.keep_alive.longest_step()};
  std::map<int, Heard> heard_;
  std::vector<std::string> notices_;
  std::string spare_key_{};  // while this spare node waits
  std::optional<Clock::time_point> waits_since_{};  // and no round has begun
  // On the host of the store: the nodes of this round that were lost, and until
  // when a spare node has to take the place.
  struct Lost {
    std::string text{};
    Clock::time_point until{};
  };
  std::map<int, Lost> lost_;
  // On the host of the store: the nodes of the round that were given up, and
  // what take_lost_node() has not returned yet.
  std::vector<int> given_up_{};
  std::vector<LostNode> lost_nodes_{};
  int healings_ = 0;  // of note_healings()
  // On the host of the store, if a round goes on there: until when its members
  // may come.
  std::optional<Clock::time_point> gathers_until_{};
  // The rest is for the host of the store, if nodes may come and go.
  ElasticRules rules_{self_.elastic_options, self_.fewest(), self_.nnodes};
  bool has_formed_ = false;                // a round of this store has begun
  std::map<int, std::string> member_ids_;  // by node rank; of the last round
  std::optional<std::string> wait_{};      // for take_wait()
};

}  // namespace lockstep::internal

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

#include "lockstep/launch/agent_store.h"
#include "lockstep/launch/awake_clock.h"
#include "lockstep/launch/round_plan.h"

namespace lockstep {

// Unlike every other one.
std::string random_id();

// How agents know that each other live. torchrun's names and defaults.
struct KeepAlive {
  std::chrono::milliseconds interval{5000};  // between two signs of life
  int max_attempt = 3;

  // An agent that shows no sign of life for so long is lost.
  std::chrono::milliseconds allowance() const { return interval * max_attempt; }
  // For an AwakeClock that is ticked each second or more often.
  std::chrono::milliseconds longest_step() const {
    return std::min<std::chrono::milliseconds>(std::chrono::seconds(2),
                                               allowance() / 2);
  }
};

// What to add to a message that another node is gone, if the agent of `name`
// was itself not running of late: "; the agent of node 1 (its host) itself did
// not run for 20 s, ...". Else nothing.
std::string own_pause(const AwakeClock& awake, const KeepAlive& keep_alive,
                      const std::string& name);

// What an agent says of itself. All agents of a job must agree on the number
// of nodes, on max_restarts and, where they give one, on the run id.
struct NodeDescription {
  int nnodes = 1;
  std::optional<int> node_rank{};  // unset: the lowest that is free
  int nproc_per_node = 1;
  std::string role = "default";
  int max_restarts = 0;
  std::optional<std::string> run_id{};  // unset: the first agent's
  std::string host{};                   // for messages
  pid_t pid = 0;
  // Tells this agent from others: containers may share host name and pid. An
  // agent that joins once more, after it lost the store, keeps its rank.
  std::string id = random_id();
  bool hosts_store = false;
  // Its connection to the store (store_connections.h); empty if it is not
  // known.
  std::string connection{};
  KeepAlive keep_alive{};
};

struct Membership {
  int node_rank = 0;
  std::string run_id{};
  int round = 0;  // the one that is being formed, or runs
};

// What a node brings to one round.
struct RoundOffer {
  // Where rank 0 opens the workers' store; of node rank 0 only. Empty: on the
  // host of the agents' store, which each node reaches as it was told.
  std::string master_addr{};
  int master_port = 0;
};

// How a round ended: one verdict for all nodes, that of the first who says so.
struct Verdict {
  enum class Kind {
    succeeded,  // every worker returned 0
    failed,     // a worker failed or a node was lost; all start anew while
                // restarts are left
    signalled,  // a signal to one agent, forwarded, ends the job
    given_up,   // the job ends: a node absent, or the store lost
    declined,   // the job ends before it began: a node refused, or unable to
                // take part
  };
  Kind kind = Kind::succeeded;
  int node_rank = -1;  // where it happened; -1 for no node in particular
  int exit_code = 0;
  int signal = 0;      // of `signalled`
  std::string text{};  // one line for the user; says the node

  bool ends_job(int round, int max_restarts) const {
    return kind != Kind::failed || round >= max_restarts;
  }
};

// This agent may not join: one line that names both sides.
class JobRefused : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The rank that this agent wants, or every one, is held by agents that take
// part in a job that runs and may be restarted. They may be dead and not yet
// given up: to be tried again for KeepAlive::allowance(), then a refusal.
class RankTaken : public JobRefused {
 public:
  using JobRefused::JobRefused;
};

// The store holds what no agent of this version wrote.
class ForeignRecord : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The store belongs to a job that is ending: try the next.
class JobClosed : public std::runtime_error {
 public:
  JobClosed() : std::runtime_error("the job at this store has ended") {}
};

// What the agents of a job write into their store and how they read it
// (docs/launcher.md, "Between the nodes"). No call waits for another node: the
// owner asks again and again (job_member.h). One thread.
// Every member throws AgentStoreError where the store is lost, ForeignRecord
// where it holds what no agent wrote.
class NodeProtocol {
 public:
  using Clock = std::chrono::steady_clock;
  // The names of the connections that the host of the store has accepted and
  // that are open.
  using Connections = std::function<std::set<std::string>()>;

  NodeProtocol(AgentStore& store, NodeDescription self,
               Connections accepted = {})
      : store_(store), self_(std::move(self)), accepted_(std::move(accepted)) {}

  // Takes a node rank. Throws JobRefused, which the nodes that are still
  // waiting for others are told, too; RankTaken; JobClosed.
  Membership join();
  // Instead of join(), for a node that cannot take part: ends the wait of the
  // others with `verdict`. A job that runs is not disturbed. Throws JobClosed.
  void decline(const Verdict& verdict);

  // Requires join(). Rounds follow each other, from Membership::round. Throws
  // JobRefused if this node was given up as lost and another has its rank.
  void offer_round(int round, const RoundOffer& offer);
  // This node's place once every node has offered; given once.
  std::optional<RoundPlan> take_plan();
  // The round offered last; before that the one that join() found.
  int round() const { return round_; }
  // The node ranks that have not offered this round, or were lost since.
  std::vector<int> absent_nodes();

  // Every worker of this node has returned 0.
  void report_success();
  // A worker of this node has failed as the echo of another one's failure: the
  // nodes are to look which of their workers was failing before.
  void ask_for_cause();
  // Whether a node asks so in round(); true once a round.
  bool take_question();
  // Ends `round` with `verdict` unless it has one already.
  void propose(int round, const Verdict& verdict);
  // The verdict of round(), once it has one; given once a round.
  std::optional<Verdict> take_verdict();

  // To be called once a second or more often: shows that this node lives. The
  // host of the store also looks who does not. The rank of a node that was lost
  // is free again; the round that it takes part in has failed, one that is
  // being formed without it waits for another node.
  void beat(Clock::time_point now);
  // A line for the user about a node that was lost between two rounds; each
  // once.
  std::optional<std::string> take_notice();

  // This node needs the store no more. While the job goes on, its rank is free
  // for another.
  void depart();
  // True once every node that has joined has departed or was lost: only then
  // may the host of the store go. Every node of the job, joined or not, if a
  // node has declined: those who come later must be told.
  bool others_have_departed();
  bool declined() const { return declined_; }

  // "node 1 (its host)"; "node 1" where it has not joined.
  std::string name_of(int node_rank);
  // The node that hosts the store; empty while nobody has said so.
  std::string name_of_store_host();

 private:
  // The last beat of a node that has joined and has not departed.
  struct Heard {
    std::string beat;
    Clock::duration since{};  // by awake_
    bool connected = false;   // its connection was among the accepted ones
  };

  std::string round_key(int round, const std::string& leaf) const;
  std::string own_record() const;
  void agree_on_job();
  void claim_rank();
  int current_round();
  bool has_begun();
  void end_forming_round(int round, const Verdict& verdict);
  [[noreturn]] void refuse(const std::string& reason);
  [[noreturn]] void refuse_rank(const std::string& reason);
  void look_for_lost_nodes();
  // Why the node is lost; nothing while it lives.
  std::optional<std::string> fate_of(int node_rank,
                                     const std::set<std::string>& accepted);
  void give_up(int node_rank, const std::string& fate);
  void vacate(int node_rank);

  AgentStore& store_;
  NodeDescription self_;
  Connections accepted_;
  int job_nnodes_ = 1;  // as the first agent said
  std::string run_id_;
  int node_rank_ = -1;
  int round_ = 0;
  bool offered_ = false;
  bool plan_given_ = false;
  bool question_given_ = false;
  bool verdict_given_ = false;
  bool job_ended_ = false;
  bool declined_ = false;  // the last verdict says so, or this node has
  int64_t beats_ = 0;
  Clock::time_point next_beat_{};
  Clock::time_point next_look_{};
  AwakeClock awake_{self_.keep_alive.longest_step()};
  std::map<int, Heard> heard_;
  std::vector<std::string> notices_;
};

}  // namespace lockstep

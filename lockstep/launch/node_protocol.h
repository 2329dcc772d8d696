#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/launch/agent_store.h"
#include "lockstep/launch/round_plan.h"

namespace lockstep {

// Unlike every other one.
std::string random_id();

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
};

struct Membership {
  int node_rank = 0;
  std::string run_id{};
};

// What a node brings to one round.
struct RoundOffer {
  // Where rank 0 opens the workers' store; of node rank 0 only.
  std::string master_addr{};
  int master_port = 0;
};

// How a round ended: one verdict for all nodes, that of the first who says so.
struct Verdict {
  enum class Kind {
    succeeded,  // every worker returned 0
    failed,     // a worker failed; all start anew while restarts are left
    signalled,  // a signal to one agent, forwarded, ends the job
    given_up,   // the job ends: a node lost, absent or refused
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
  static constexpr std::chrono::milliseconds kBeatInterval{1000};
  // A node that has not been heard of for so long is lost.
  static constexpr std::chrono::milliseconds kBeatAllowance{3000};

  NodeProtocol(AgentStore& store, NodeDescription self)
      : store_(store), self_(std::move(self)) {}

  // Takes a node rank. Throws JobRefused, which the nodes that are still
  // waiting for others are told, too; JobClosed.
  Membership join();

  // Requires join(). Rounds are numbered from 0 and follow each other.
  void offer_round(int round, const RoundOffer& offer);
  // This node's place once every node has offered; given once.
  std::optional<RoundPlan> take_plan();
  // The round offered last; 0 before the first.
  int round() const { return round_; }
  // The node ranks that have not offered this round.
  std::vector<int> absent_nodes();

  // Every worker of this node has returned 0.
  void report_success();
  // Ends `round` with `verdict` unless it has one already.
  void propose(int round, const Verdict& verdict);
  // The verdict of the round offered last (of round 0 before the first), once
  // it has one; given once a round.
  std::optional<Verdict> take_verdict();

  // To be called more often than kBeatInterval: shows that this node lives.
  // The host of the store also looks who does not, and gives up the job for a
  // node that was lost.
  void beat(Clock::time_point now);

  // This node needs the store no more.
  void depart();
  // True once every node that has joined has departed or was lost: only then
  // may the host of the store go.
  bool others_have_departed();

  // "node 1 (its host)"; "node 1" where it has not joined.
  std::string name_of(int node_rank);
  // The node that hosts the store; empty while nobody has said so.
  std::string name_of_store_host();

 private:
  struct Heard {
    std::string beat;
    Clock::time_point since;
  };

  std::string round_key(int round, const std::string& leaf) const;
  void agree_on_job();
  void claim_rank();
  [[noreturn]] void refuse(const std::string& reason);
  void look_for_lost_nodes(Clock::time_point now);

  AgentStore& store_;
  NodeDescription self_;
  int job_nnodes_ = 1;  // as the first agent said
  std::string run_id_;
  int node_rank_ = -1;
  int round_ = 0;
  bool offered_ = false;
  bool plan_given_ = false;
  bool verdict_given_ = false;
  int64_t beats_ = 0;
  Clock::time_point next_beat_{};
  std::map<int, Heard> heard_;
  std::set<int> lost_;
};

}  // namespace lockstep

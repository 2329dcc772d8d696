#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

class StoreLine;  // agent_store.h

// The place of a node's workers among those of all nodes. Global ranks go by
// node rank, then by local rank; so do role ranks, among the nodes of one role.
struct NodePlace {
  // Returns the place of the only node, which has `workers` workers.
  static NodePlace alone(int workers) {
    NodePlace place;
    place.world_size = workers;
    place.role_world_size = workers;
    return place;
  }

  int node_rank = 0;
  int nnodes = 1;
  int first_rank = 0;
  int world_size = 1;
  int first_role_rank = 0;
  int role_world_size = 1;
};

// A node that is gone for good, while the others go on (--heal=shrink).
struct LostNode {
  std::string cause{};        // in one line
  std::vector<int> places{};  // of its ranks (worker/healing_place.h)
};

// The plan by which a node starts one attempt. If there are several nodes, they
// agree on it in the rendezvous round of the same number.
struct RoundPlan {
  int round = 0;  // number of the attempt
  int restarts_used = 0;
  NodePlace place{};
  std::string master_addr = "127.0.0.1";  // where rank 0 opens its store
  int master_port = 0;
  // Why the node that had this place is gone, in one line, if the others stay:
  // the workers of this node join theirs (worker/healing_place.h). Otherwise
  // empty.
  std::string lost_node{};
  // The last generation that is known of the workers that stay, if the store
  // was lost with that node; otherwise 0.
  int generation = 0;
  // To the agents' store, for the calls of this node's workers. Null if there
  // is one node, the agents' store is not ours, or the workers are Python's.
  std::shared_ptr<StoreLine> line{};
  // If the store is lost, another line may take the place of this one.
  bool line_is_renewed = false;
};

// How often the workers of a job were started again, by cause. Equal on all
// nodes.
struct ChangeCount {
  // After a failure; and, as the same option limits both, how often a process
  // took the place of one that failed (worker/healing_place.h).
  int restarts = 0;
  int membership_changes = 0;  // because a node came or went

  bool operator==(const ChangeCount&) const = default;
};

// How often they may be started again.
struct ChangeLimits {
  int restarts = 0;
  std::optional<int> membership_changes{};  // nothing means no limit
};

// How a round ended. All nodes follow one verdict for it: the first that a node
// proposed.
struct Verdict {
  enum class Kind {
    succeeded,  // every worker returned 0
    failed,     // a worker failed or, if their number is fixed, a node was
                // lost; all workers start again while restarts are left
    signalled,  // a signal that one agent forwarded ends the job
    given_up,   // the job ends: a node is absent, or the store is lost
    declined,   // the job ends before it began: a node was refused or cannot
                // take part
    // The members of a job with MIN to MAX nodes change; all workers start
    // again while membership changes are left:
    node_lost,    // its workers are gone, or not to be reached
    node_leaves,  // its agent got a signal; all workers have time to end well
    node_waits,   // it comes from now on; all workers have time to end well
  };
  static constexpr Kind kLastKind = Kind::node_waits;

  Kind kind = Kind::succeeded;
  int node_rank = -1;  // where it happened; -1 for no particular node
  int exit_code = 0;
  int signal = 0;      // for `signalled`
  std::string text{};  // one line for the user; names the node
  // The changes up to the next round: those of this one, and what this verdict
  // adds. NodeProtocol::propose() sets it.
  ChangeCount changes{};
  // How many generations this attempt has had after the first, as the node
  // knows that proposes the verdict. Never in a store: `changes` has them.
  int healings = 0;
  // The store was lost with its host, and the nodes meet at another one. Never
  // in a store.
  bool moves = false;

  bool changes_membership() const { return kind >= Kind::node_lost; }
  // Returns `used` and what this verdict adds to it.
  ChangeCount after(ChangeCount used) const {
    used.restarts += healings + (kind == Kind::failed);
    used.membership_changes += changes_membership();
    return used;
  }
  bool ends_job(const ChangeLimits& limits) const {
    if (kind == Kind::failed) return changes.restarts > limits.restarts;
    return !changes_membership() ||
           (limits.membership_changes &&
            changes.membership_changes > *limits.membership_changes);
  }
};

}  // namespace lockstep::internal

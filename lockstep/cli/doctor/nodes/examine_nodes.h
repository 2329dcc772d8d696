#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/nodes/link_probe.h"
#include "lockstep/cli/doctor/nodes/nodes_findings.h"
#include "lockstep/launch/nodes/agent_store.h"
#include "lockstep/launch/nodes/job_member.h"

namespace lockstep::internal {

// Thrown if this node may not take part. what() is one line that names both
// sides and says what to do.
class MeetingRefused : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Thrown if the store belongs to a meeting that is over: try again, as the next
// one's may come soon.
class MeetingOver : public std::runtime_error {
 public:
  MeetingOver() : std::runtime_error("the nodes that met here have parted") {}
};

// How the nodes on which `lockstep doctor` runs agree, through the agents'
// store, under keys that no job uses (docs/internals/doctor.md). For
// one thread. Members throw AgentStoreError if the store is lost, and
// std::runtime_error for a record that no doctor wrote.
class Meeting {
 public:
  // `nodes` shall meet. All must give the same number, and the same `run_id`.
  Meeting(AgentStore& store, int nodes, std::string run_id)
      : store_(store), nodes_(nodes), run_id_(std::move(run_id)) {}

  // Takes part as node `rank`, or as the lowest that is free, and tells the
  // others `record`. Returns the rank. Throws MeetingRefused, MeetingOver.
  int join(std::optional<int> rank, const NodeRecord& record);
  // Waits until all nodes have joined; false after the deadline.
  bool await_all(const Deadline& deadline);
  // Returns the ranks of the nodes that have not joined.
  std::vector<int> absent();
  // Returns the ranks that take part, in ascending order, once all nodes have
  // joined, and at the latest after the deadline without those that have not:
  // all nodes get the same list. Throws MeetingRefused if this node came too
  // late for it.
  std::vector<int> await_members(const Deadline& deadline);
  const NodeRecord& record_of(int rank);

  // Says what this node found on the way to `to`.
  void tell_link(int to, const LinkFigures& figures);
  // Returns whether `from` has told what it found on the way to this node.
  // Waits until that, until `wake_fd` is readable, or for a short time.
  bool await_link(int from, int wake_fd);
  // Returns what `from` has told about the way to `to`; nothing if it has not
  // before the deadline.
  std::optional<LinkFigures> link(int from, int to, const Deadline& deadline);

  // Tells all others the verdict, a text.
  void tell_verdict(const std::string& text);
  // Returns the verdict; nothing if there is none before the deadline.
  std::optional<std::string> await_verdict(const Deadline& deadline);

  // Says that this node no longer needs the store.
  void part();
  // Waits until each of `members` has parted: only then may the host of the
  // store end. Gives up at the deadline.
  void await_parting(const std::vector<int>& members, const Deadline& deadline);

 private:
  // Returns the value of `key` once it is set.
  std::optional<std::string> await_key(const std::string& key,
                                       const Deadline& deadline);
  bool claim(int rank, const NodeRecord& record);

  AgentStore& store_;
  int nodes_;
  std::string run_id_;
  int rank_ = -1;
  std::map<int, NodeRecord> records_;
};

// Meets the doctors of the other nodes at the agents' store, measures the links
// to them, and returns the verdict on all nodes and links, the finding "nodes",
// which all nodes return alike. On the first node of those that have come it
// comes after the findings of each node and of the links (nodes_findings.h).
//
// `meeting` says where the nodes meet, how many they are, and for how long this
// one waits for the store and after that for the others (join_timeout). `own`:
// what was found on this host. `say` gets lines for the user while it waits.
//
// Blocks for those two times at most, 20 s for each step of link_plan(), and
// 40 s more. Throws std::invalid_argument if this node cannot take part,
// AgentStoreError if the store is lost, each with one line.
std::vector<Finding> examine_nodes(
    const JobMemberOptions& meeting, const std::vector<Finding>& own,
    const std::function<void(const std::string&)>& say);

}  // namespace lockstep::internal

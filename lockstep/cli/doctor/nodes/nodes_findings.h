#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/nodes/link_probe.h"

namespace lockstep::internal {

// Returns the first `most` bytes of `text` by shown_line(): what other hosts
// send may end on a terminal.
std::string printable(std::string_view text, size_t most = 200);

// The record by which `lockstep doctor` on one node informs the other nodes,
// through the agents' store. A value that a node does not know is empty or
// nothing.
struct NodeRecord {
  struct Trouble {  // a check of that host that did not end well
    std::string name{};
    Health health = Health::warn;
    std::string found{};
  };
  std::string id{};  // of this run of the doctor there; differs from all others
  std::string host{};
  std::string lockstep{};        // version
  std::string architecture{};    // "x86_64"
  std::string torch{};           // LibTorch's version
  std::string cpu_capability{};  // "AVX512", as LibTorch calls it
  std::optional<int64_t> cores{};
  std::optional<int64_t> memory_bytes{};
  std::optional<int64_t> gpus{};
  std::vector<Trouble> troubles{};
  // Where its LinkListener is reached. No address: at the endpoint's, by which
  // each node knows the host of the agents' store itself.
  std::string address{};
  int port = 0;
  std::string token{};

  // Returns the record as one JSON document that a store takes: of texts that
  // are too long, the beginning.
  std::string text() const;
  // Parses text() of another node, maybe of another version. Nothing in it is
  // believed to be short or printable. Throws std::runtime_error if it is not
  // such a record.
  static NodeRecord parse(const std::string& text);
};

// Returns the record of this host, of which the checks have found `findings`;
// without address, port and token.
NodeRecord own_record(const std::vector<Finding>& findings);

// The records of the doctors of all nodes.
struct NodesFound {
  int nodes = 0;  // that were asked for; those without a record are absent
  std::map<int, NodeRecord> records{};
  // The links that were to be measured, the lower rank first.
  std::vector<std::pair<int, int>> links{};
  // The key is the rank from which and that to which a way leads. A way is
  // missing if its node has not told in time.
  std::map<std::pair<int, int>, LinkFigures> ways{};
};

// Returns a finding for each node, for each link that is broken or slow, and
// for all other links together. What is usual is what the best quarter of the
// ways reaches, as one bad host spoils all of its links.
std::vector<Finding> nodes_findings(const NodesFound& found);

// Returns the verdict on `findings`, which node `rank` shows: a finding "nodes"
// that names those that are not well.
Finding nodes_verdict(const NodesFound& found,
                      const std::vector<Finding>& findings);

}  // namespace lockstep::internal

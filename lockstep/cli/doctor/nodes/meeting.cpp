#include "lockstep/cli/doctor/nodes/meeting.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// The longest wait for one change, so that a change that is missed costs only
// this.
constexpr milliseconds kLongestWait{500};

constexpr const char* kPrefix = "doctor/";
const std::string kJob = std::string(kPrefix) + "job";
const std::string kArrivals = std::string(kPrefix) + "arrivals";
const std::string kMembers = std::string(kPrefix) + "members";
const std::string kVerdict = std::string(kPrefix) + "verdict";

std::string node_key(int rank) {
  return kPrefix + ("node/" + std::to_string(rank));
}

std::string parted_key(int rank) {
  return kPrefix + ("parted/" + std::to_string(rank));
}

std::string link_key(int from, int to) {
  return kPrefix + ("link/" + std::to_string(from) + "/" + std::to_string(to));
}

std::string list_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ",") + std::to_string(rank);
  }
  return text;
}

// Parses list_text().
std::vector<int> parse_list(const std::string& text, int nodes) {
  std::vector<int> ranks;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    int rank = -1;
    const auto [rest, error] = std::from_chars(at, end, rank);
    const int last = ranks.empty() ? -1 : ranks.back();
    if (error != std::errc() || rank <= last || rank >= nodes ||
        (rest != end && *rest != ',')) {
      throw std::runtime_error("the agents' store holds a foreign " + kMembers);
    }
    ranks.push_back(rank);
    at = rest == end ? end : rest + 1;
  }
  return ranks;
}

}  // namespace

bool Meeting::claim(int rank, const NodeRecord& record) {
  const std::string mine = record.text();
  if (store_.set_if_absent(node_key(rank), mine) != mine) return false;
  rank_ = rank;
  records_[rank] = record;
  return true;
}

int Meeting::join(std::optional<int> rank, const NodeRecord& record) {
  if (store_.check(kVerdict)) throw MeetingOver();
  const std::string mine = nlohmann::ordered_json{
      {"nnodes", nodes_},
      {"rdzv_id", run_id_},
      {"host", record.host}}.dump();
  const auto job = nlohmann::ordered_json::parse(
      store_.set_if_absent(kJob, mine), nullptr, false);
  const auto refuse_if_other = [&](const char* name, const std::string& option,
                                   const nlohmann::ordered_json& own) {
    const auto other = job.is_object() ? job.value(name, own) : own;
    if (other == own) return;
    throw MeetingRefused(option + " is " + own.dump() + " here (" +
                         record.host + ") and " + other.dump() + " on " +
                         job.value("host", std::string("another node")) +
                         "; give all nodes the same");
  };
  refuse_if_other("nnodes", "--nnodes", nodes_);
  refuse_if_other("rdzv_id", "--rdzv-id", run_id_);
  if (rank) {
    if (!claim(*rank, record)) {
      throw MeetingRefused(
          "two nodes have --node-rank=" + std::to_string(*rank) +
          ": this one (" + record.host + ") and " + record_of(*rank).host +
          "; give each its own. If the second is an earlier "
          "start of this one, start all nodes again");
    }
  } else {
    int free = 0;
    while (free < nodes_ && !claim(free, record)) ++free;
    if (free == nodes_) {
      throw MeetingRefused("all " + std::to_string(nodes_) +
                           " nodes of --nnodes have come already; start the "
                           "doctor once on each host, or raise --nnodes");
    }
  }
  // The last node knows that all have come.
  if (store_.add(kArrivals, 1) == nodes_) {
    std::vector<int> all;
    for (int one = 0; one < nodes_; ++one) all.push_back(one);
    store_.set_if_absent(kMembers, list_text(all));
  }
  return rank_;
}

bool Meeting::await_all(const Deadline& deadline) {
  return await_key(kMembers, deadline).has_value();
}

std::vector<int> Meeting::absent() {
  std::vector<int> ranks;
  for (int rank = 0; rank < nodes_; ++rank) {
    if (!store_.check(node_key(rank))) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> Meeting::await_members(const Deadline& deadline) {
  auto members = await_key(kMembers, deadline);
  if (!members) {
    const auto missing = absent();
    std::vector<int> present;
    for (int rank = 0; rank < nodes_; ++rank) {
      if (!std::ranges::binary_search(missing, rank)) present.push_back(rank);
    }
    members = store_.set_if_absent(kMembers, list_text(present));
  }
  auto ranks = parse_list(*members, nodes_);
  if (std::ranges::find(ranks, rank_) == ranks.end()) {
    throw MeetingRefused(
        "this node came too late: the others had waited for it and have begun "
        "without it; start all nodes again, or give them more time by "
        "--rdzv-conf=join_timeout=SECONDS");
  }
  return ranks;
}

const NodeRecord& Meeting::record_of(int rank) {
  auto found = records_.find(rank);
  if (found == records_.end()) {
    const auto text = store_.get(node_key(rank));
    try {
      if (!text) throw std::runtime_error("it has no record");
      found = records_.emplace(rank, NodeRecord::parse(*text)).first;
    } catch (const std::runtime_error& error) {
      throw std::runtime_error("node " + std::to_string(rank) + ": " +
                               error.what());
    }
  }
  return found->second;
}

void Meeting::tell_link(int to, const LinkFigures& figures) {
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  store_.set(link_key(rank_, to),
             figures.json().dump(-1, ' ', false, kReplace));
}

bool Meeting::await_link(int from, int wake_fd) {
  const std::string key = link_key(from, rank_);
  if (store_.check(key)) return true;
  store_.await_change({key}, kLongestWait, wake_fd);
  return store_.check(key);
}

std::optional<LinkFigures> Meeting::link(int from, int to,
                                         const Deadline& deadline) {
  const auto text = await_key(link_key(from, to), deadline);
  if (!text) return std::nullopt;
  return LinkFigures::parse(*text);
}

void Meeting::tell_verdict(const std::string& text) {
  store_.set(kVerdict, text);
}

std::optional<std::string> Meeting::await_verdict(const Deadline& deadline) {
  return await_key(kVerdict, deadline);
}

void Meeting::part() { store_.set(parted_key(rank_), "1"); }

void Meeting::await_parting(const std::vector<int>& members,
                            const Deadline& deadline) {
  for (const int rank : members) await_key(parted_key(rank), deadline);
}

std::optional<std::string> Meeting::await_key(const std::string& key,
                                              const Deadline& deadline) {
  while (true) {
    if (auto value = store_.get(key)) return value;
    if (deadline.expired()) return std::nullopt;
    store_.await_change({key}, std::min(kLongestWait, deadline.remaining()),
                        /*wake_fd=*/-1);
  }
}

}  // namespace lockstep::internal

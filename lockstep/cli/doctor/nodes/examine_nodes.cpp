#include "lockstep/cli/doctor/nodes/examine_nodes.h"

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/number_list.h"
#include "lockstep/cli/doctor/nodes/link_listener.h"
#include "lockstep/launch/nodes/store_connections.h"
#include "lockstep/launch/nodes/store_connector.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// The longest wait for one change, so that a change that is missed costs only
// this.
constexpr milliseconds kLongestWait{500};

// A run id, for one, may hold any bytes.
constexpr auto kReplaceBytes = nlohmann::ordered_json::error_handler_t::replace;

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
      {"host", record.host}}.dump(-1, ' ', false, kReplaceBytes);
  const auto job = nlohmann::ordered_json::parse(
      store_.set_if_absent(kJob, mine), nullptr, false);
  const auto own_job = nlohmann::ordered_json::parse(mine);
  const auto refuse_if_other = [&](const char* name,
                                   const std::string& option) {
    const auto& own = own_job.at(name);
    const auto other = job.is_object() ? job.value(name, own) : own;
    if (other == own) return;
    throw MeetingRefused(option + " is " + own.dump() + " here (" +
                         record.host + ") and " + other.dump() + " on " +
                         job.value("host", std::string("another node")) +
                         "; give all nodes the same");
  };
  refuse_if_other("nnodes", "--nnodes");
  refuse_if_other("rdzv_id", "--rdzv-id");
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
  store_.set(link_key(rank_, to),
             figures.json().dump(-1, ' ', false, kReplaceBytes));
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

namespace {

// Both ways of a link, and time to spare.
constexpr milliseconds kStepTime = 2 * kMostLinkTime + milliseconds(4000);
constexpr milliseconds kFirstNotice{5000};
constexpr milliseconds kVerdictTime{10'000};
constexpr milliseconds kPartingTime{5000};
constexpr milliseconds kRetryInterval{200};
constexpr size_t kMostVerdict = 2000;  // bytes of one of its texts
// How long the kernel of another host may acknowledge nothing.
constexpr milliseconds kDeadHostAllowance{10'000};

// Breaks the connection to the store when the time is over, since an operation
// of the store waits for its answer without a limit.
class Watchdog {
 public:
  Watchdog(int port, milliseconds allowed)
      : thread_([this, port, allowed](const std::stop_token& stop) {
          std::unique_lock lock(mutex_);
          milliseconds next = allowed;
          while (!stop.stop_requested()) {
            if (ended_.wait_for(lock, stop, next, [] { return false; })) return;
            if (stop.stop_requested()) return;
            shut_connections_to(port);
            next = milliseconds(1000);
          }
        }) {}

 private:
  std::mutex mutex_;
  std::condition_variable_any ended_;
  std::jthread thread_;  // last: it uses the others
};

class Examination {
 public:
  Examination(const JobMemberOptions& options, const OpenedStore& opened,
              const std::vector<Finding>& own)
      : options_(options),
        meeting_(*opened.store, options.node.nnodes,
                 options.node.run_id.value_or("")),
        record_(own_record(own)),
        hosting_(opened.hosting),
        listener_(reached_at(options, opened), options.node.nnodes) {
    record_.address =
        options.local_addr.empty() ? opened.reachable_host : options.local_addr;
    record_.port = listener_.port();
    record_.token = listener_.token();
  }

  // Throws MeetingOver.
  void join() { rank_ = meeting_.join(options_.node.node_rank, record_); }

  std::vector<Finding> examine(
      const std::function<void(const std::string&)>& say) {
    const Deadline deadline = Deadline::after(options_.join_timeout);
    if (!meeting_.await_all(
            Deadline::after(std::min(kFirstNotice, options_.join_timeout)))) {
      say("waiting for " + name_numbers("node", meeting_.absent()) + " of " +
          std::to_string(options_.node.nnodes) + ", for at most " +
          seconds_text(options_.join_timeout) + ", at " +
          options_.store.endpoint.text() + ", where " + hosting_);
    }
    members_ = meeting_.await_members(deadline);
    plan_ = link_plan(static_cast<int>(members_.size()));
    const Deadline measured =
        Deadline::after(kStepTime * static_cast<int>(plan_.size()));
    measure_links();
    if (rank_ == members_.front()) return show(measured);
    const auto text = meeting_.await_verdict(
        Deadline::after(measured.remaining() + kVerdictTime));
    return {parsed(text)};
  }

  // Ends this node's part; the host of the store waits for the others.
  void part(bool hosted) {
    meeting_.part();
    if (hosted) meeting_.await_parting(members_, Deadline::after(kPartingTime));
  }

 private:
  static std::string reached_at(const JobMemberOptions& options,
                                const OpenedStore& opened) {
    if (!options.local_addr.empty()) return options.local_addr;
    return opened.reachable_host.empty() ? options.store.endpoint.host
                                         : opened.reachable_host;
  }

  void measure_links() {
    const auto place = static_cast<size_t>(std::ranges::find(members_, rank_) -
                                           members_.begin());
    Deadline deadline = Deadline::after(milliseconds(0));
    const auto begin = Deadline::Clock::now();
    milliseconds until{0};
    for (const LinkStep& step : plan_) {
      until += kStepTime;
      deadline = Deadline::after(until, begin);
      if (!step[place]) continue;
      const int partner = members_[static_cast<size_t>(*step[place])];
      if (rank_ < partner) {
        ask(partner, deadline);
        answer(partner, deadline);
      } else {
        answer(partner, deadline);
        ask(partner, deadline);
      }
    }
  }

  void ask(int partner, const Deadline& deadline) {
    const NodeRecord& other = meeting_.record_of(partner);
    const Endpoint endpoint{
        other.address.empty() ? options_.store.endpoint.host : other.address,
        other.port};
    meeting_.tell_link(partner,
                       measure_link(endpoint, other.token, rank_, deadline));
  }

  void answer(int partner, const Deadline& deadline) {
    while (!deadline.expired()) {
      if (auto stream = listener_.take(partner)) {
        answer_link(std::move(*stream));
        return;
      }
      // A partner that does not reach this node says so there.
      if (meeting_.await_link(partner, listener_.fd())) return;
    }
  }

  std::vector<Finding> show(const Deadline& measured) {
    NodesFound found{.nodes = options_.node.nnodes};
    for (const int rank : members_) {
      found.records[rank] = meeting_.record_of(rank);
    }
    for (const auto& [one, other] : links_of(plan_)) {
      const int lower = members_[static_cast<size_t>(one)];
      const int higher = members_[static_cast<size_t>(other)];
      found.links.emplace_back(lower, higher);
      for (const auto& [from, to] :
           {std::pair(lower, higher), std::pair(higher, lower)}) {
        if (const auto figures = meeting_.link(from, to, measured)) {
          found.ways[{from, to}] = *figures;
        }
      }
    }
    auto findings = nodes_findings(found);
    findings.push_back(nodes_verdict(found, findings));
    const Finding& verdict = findings.back();
    meeting_.tell_verdict(nlohmann::ordered_json{
        {"health", static_cast<int>(verdict.health)},
        {"found", verdict.found},
        {"advice",
         verdict.advice}}.dump(-1, ' ', false, kReplaceBytes));
    return findings;
  }

  Finding parsed(const std::optional<std::string>& text) {
    Finding verdict{.name = "nodes"};
    if (!text) {
      verdict.found = "node " + std::to_string(members_.front()) + " (" +
                      meeting_.record_of(members_.front()).host +
                      ") has given no verdict";
      verdict.fail("It may have ended. Start all nodes again.");
      return verdict;
    }
    const auto document = nlohmann::ordered_json::parse(*text);
    verdict.health =
        static_cast<Health>(std::clamp(document.at("health").get<int>(), 0, 2));
    verdict.found =
        printable(document.at("found").get<std::string>(), kMostVerdict);
    verdict.advice =
        printable(document.at("advice").get<std::string>(), kMostVerdict);
    return verdict;
  }

  const JobMemberOptions& options_;
  Meeting meeting_;
  NodeRecord record_;
  std::string hosting_;  // OpenedStore::hosting
  LinkListener listener_;
  int rank_ = -1;
  std::vector<int> members_;
  std::vector<LinkStep> plan_;
};

}  // namespace

std::vector<Finding> examine_nodes(
    const JobMemberOptions& meeting, const std::vector<Finding>& own,
    const std::function<void(const std::string&)>& say) {
  const StoreConnector connector(meeting.store);
  const int port = meeting.store.endpoint.port;
  const auto steps =
      static_cast<int>(link_plan(meeting.node.nnodes).size()) + 1;
  const Watchdog watchdog(port, meeting.store.timeout + meeting.join_timeout +
                                    kStepTime * steps + kVerdictTime +
                                    kPartingTime);
  const Deadline deadline = Deadline::after(meeting.store.timeout);
  while (true) {
    const OpenedStore opened = connector.open([] { return false; }, say);
    break_connections_of_dead_hosts(port, kDeadHostAllowance);
    Examination examination(meeting, opened, own);
    std::vector<Finding> findings;
    try {
      examination.join();
      findings = examination.examine(say);
    } catch (const MeetingOver&) {
      if (deadline.expired()) throw;
      std::this_thread::sleep_for(kRetryInterval);
      continue;
    } catch (const AgentStoreError& error) {
      throw AgentStoreError("the agents' store at " +
                            meeting.store.endpoint.text() +
                            " was lost: the node that hosts it has ended or "
                            "does not answer (" +
                            error.what() + ")");
    }
    try {
      examination.part(opened.hosted);
    } catch (const AgentStoreError&) {
      // The verdict is known here, and the store's host does not wait long.
    }
    return findings;
  }
}

}  // namespace lockstep::internal

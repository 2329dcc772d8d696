#include "lockstep/cli/doctor/nodes/examine_nodes.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "lockstep/base/number_list.h"
#include "lockstep/base/seconds_text.h"
#include "lockstep/cli/doctor/nodes/link_listener.h"
#include "lockstep/cli/doctor/nodes/link_plan.h"
#include "lockstep/cli/doctor/nodes/link_probe.h"
#include "lockstep/cli/doctor/nodes/meeting.h"
#include "lockstep/cli/doctor/nodes/node_record.h"
#include "lockstep/cli/doctor/nodes/nodes_findings.h"
#include "lockstep/launch/nodes/store_connections.h"
#include "lockstep/launch/nodes/store_connector.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

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
         verdict.advice}}.dump());
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
    verdict.found = printable(document.at("found"), kMostVerdict);
    verdict.advice = printable(document.at("advice"), kMostVerdict);
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

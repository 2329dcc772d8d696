// The host of the store does more than the other nodes: it looks for lost ones
// and, if nodes may come and go, begins rounds and ends them.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/nodes/node_protocol.h"
#include "lockstep/launch/nodes/node_records.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

}  // namespace

std::set<std::string> NodeProtocol::spares() {
  const int64_t numbers = store_.add(kSparesKey, 0);
  if (numbers == 0 || !accepted_) return {};
  const auto accepted = accepted_();
  std::set<std::string> waiting;
  for (int64_t number = 0; number < numbers; ++number) {
    const auto connection =
        store_.get(kStorePrefix + "spare/" + std::to_string(number));
    if (connection && accepted.contains(*connection)) {
      waiting.insert(*connection);
    }
  }
  return waiting;
}

// Returns how many of the spare nodes that wait are not to take the place of a
// node that is lost already.
int NodeProtocol::free_spares() {
  const auto waiting = spares();
  auto count = static_cast<int>(waiting.size());
  for (const auto& [rank, lost] : lost_) {
    const std::string where = node_key("node", rank);
    const auto node = store_.get(where);
    // A spare node takes the rank before it ceases to wait. Our own store, the
    // only one of jobs that heal, knows a connection by the agent's id.
    count -= !node || waiting.contains(StoreRecord(where, *node).text("id"));
  }
  return count;
}

// Begins the round or looks at its members, on the host of the store.
void NodeProtocol::keep_members(Clock::time_point now, bool looks) {
  if (!offered_ || verdict_given_) return;
  if (!plan_given_) {
    form_round(now, looks);
  } else if (looks) {
    look_at_members(now);
  }
}

void NodeProtocol::form_round(Clock::time_point now, bool looks) {
  // Reading all records after each offer would cost requests that grow with
  // the square of the number of nodes.
  const auto offers =
      static_cast<size_t>(store_.add(round_key(round_, "offers"), 0));
  const bool all_may_be_there =
      offers >= (has_formed_ ? heard_.size() + 1
                             : static_cast<size_t>(rules_.expected()));
  if (!looks && !all_may_be_there) return;
  if (offers < static_cast<size_t>(self_.fewest())) return;
  std::vector<NodeOffer> present;
  std::vector<NodeOffer> in_favour;  // not left out for a while
  bool all_offered = true;
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    const auto node = store_.get(node_key("node", rank));
    if (!node) continue;
    const std::string where = round_key(round_, "node/" + std::to_string(rank));
    const auto text = store_.get(where);
    // An agent that has taken a node rank since finds the offer of another.
    if (!text || parse_offer(rank, where, *text).id !=
                     StoreRecord(node_key("node", rank), *node).text("id")) {
      all_offered = false;
      continue;
    }
    present.push_back(parse_offer(rank, where, *text));
    if (!rules_.is_left_out(present.back().id, now)) {
      in_favour.push_back(present.back());
    }
  }
  // Too few nodes are worse than one that fails often.
  if (static_cast<int>(in_favour.size()) >= self_.fewest()) {
    present = std::move(in_favour);
  }
  if (!rules_.may_begin(static_cast<int>(present.size()), all_offered,
                        !has_formed_, now)) {
    return;
  }
  std::vector<Candidate> candidates;
  std::map<int, NodeOffer> by_rank;
  member_ids_.clear();
  for (NodeOffer& one : present) {
    const int rank = one.candidate.node_rank;
    candidates.push_back(one.candidate);
    member_ids_[rank] = one.id;
    by_rank[rank] = std::move(one);
  }
  std::vector<NodeOffer> members;
  for (const int rank : order_members(candidates)) {
    members.push_back(std::move(by_rank[rank]));
  }
  store_.set_if_absent(round_key(round_, "plan"), plan_text(members));
  has_formed_ = true;
  rules_.begin_round();
}

// Looks for members that have left without a verdict, and for nodes that wait.
void NodeProtocol::look_at_members(Clock::time_point now) {
  std::vector<int> waiting;
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    const auto node = store_.get(node_key("node", rank));
    const auto id = node ? StoreRecord(node_key("node", rank), *node).text("id")
                         : std::string();
    if (const auto member = member_ids_.find(rank);
        member != member_ids_.end()) {
      if (id == member->second) continue;
      Verdict verdict;
      verdict.kind = Verdict::Kind::node_lost;
      verdict.node_rank = rank;
      verdict.exit_code = kSystemError;
      verdict.text = "node " + std::to_string(rank) + " has left the job";
      propose(round_, verdict);
      return;
    }
    if (node &&
        store_.check(round_key(round_, "node/" + std::to_string(rank))) &&
        !rules_.is_left_out(id, now)) {
      waiting.push_back(rank);
    }
  }
  let_in(waiting, now);
}

void NodeProtocol::let_in(const std::vector<int>& waiting,
                          Clock::time_point now) {
  // Once a node has succeeded, the job is about to end.
  if (!may_grow() || store_.add(round_key(round_, "succeeded"), 0) > 0) {
    return;
  }
  const auto count = static_cast<int>(waiting.size());
  const bool begins = rules_.note_waiting(count, now);
  if (!begins && !rules_.may_grow(now)) return;
  std::string names;
  for (const int rank : waiting) {
    names += (names.empty() ? "" : ", ") + name_of(rank);
  }
  if (begins) {
    wait_ = names + (count == 1 ? " waits" : " wait") +
            " to take part: all workers start again after the program's next "
            "snapshot, in " +
            seconds_text(self_.elastic_options.scale_up_wait) +
            " at the latest";
  }
  if (!rules_.may_grow(now)) return;
  Verdict verdict;
  verdict.kind = Verdict::Kind::node_waits;
  verdict.node_rank = waiting.front();
  verdict.exit_code = kSystemError;
  verdict.text = names + (count == 1 ? " takes" : " take") +
                 " part from now on, with " + std::to_string(members_.size()) +
                 (members_.size() == 1 ? " other" : " others");
  propose(round_, verdict);
}

std::optional<std::string> NodeProtocol::take_wait() {
  return std::exchange(wait_, std::nullopt);
}

void NodeProtocol::note_failing_node(const Verdict& verdict) {
  if (!self_.hosts_store || verdict.kind != Verdict::Kind::failed) return;
  const auto member = member_ids_.find(verdict.node_rank);
  if (member == member_ids_.end() ||
      !rules_.note_failure(member->second, last_beat_)) {
    return;
  }
  const ElasticOptions& rules = self_.elastic_options;
  notices_.push_back("the workers of " + name_of(verdict.node_rank) +
                     " failed " + std::to_string(rules.failures) +
                     " times within " + seconds_text(rules.within) +
                     "; the node is left out for " +
                     seconds_text(rules.cooling));
}

void NodeProtocol::look_for_lost_nodes(Clock::time_point now) {
  const auto accepted = accepted_ ? accepted_() : std::set<std::string>();
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    if (rank == node_rank_) continue;
    if (const auto loss = loss_of(rank, accepted)) give_up(rank, *loss, now);
  }
}

// The members of a round that goes on come to this store, but for the host of
// the store before, whose place is free then.
void NodeProtocol::gather_members(Clock::time_point now) {
  if (!gathers_until_) return;
  const RunningRound& running = *self_.earlier.running;
  std::vector<int> absent;
  int generation = 0;
  for (const int rank : members_) {
    if (rank == running.lost_node) continue;
    const std::string where = round_key(round_, "node/" + std::to_string(rank));
    if (const auto text = store_.get(where)) {
      generation =
          std::max(generation, parse_offer(rank, where, *text).generation);
    } else {
      absent.push_back(rank);
    }
  }
  const bool has_ended = store_.check(round_key(round_, "verdict"));
  if (!has_ended && !absent.empty() && now < *gathers_until_) return;
  gathers_until_.reset();
  if (!has_ended && absent.empty()) {
    store_.set(
        round_key(round_, loss_leaf(running.lost_node)),
        record_text(json{{"text", running.loss}, {"generation", generation}}));
    report_healing();  // for the node that is lost
    lost_[running.lost_node] = {.text = running.loss,
                                .until = now + kReplacedWithin};
  } else if (!has_ended) {
    fail_round(absent.front(), running.loss + ", and node " +
                                   std::to_string(absent.front()) +
                                   " has not come to the next store");
  }
  // Now others may take ranks that are free.
  store_.set_if_absent(round_key(round_, "plan"), plan_);
  store_.add(kVacanciesKey, 1);
}

// Ends the round if a spare node that waited has not come.
void NodeProtocol::look_for_replacements(Clock::time_point now) {
  for (auto at = lost_.begin(); at != lost_.end();) {
    const auto& [rank, lost] = *at;
    const bool has_come =
        store_.check(round_key(round_, "node/" + std::to_string(rank)));
    if (!has_come && now < lost.until) {
      ++at;
      continue;
    }
    if (!has_come) {
      fail_round(rank, lost.text + ", and no spare node took its place");
    }
    at = lost_.erase(at);
  }
}

// Whether the round goes on if this node of it is lost; adds to `text` why not,
// if a spare node waits, or none has to. A node that has succeeded would be
// counted twice.
bool NodeProtocol::may_go_on_without(int node_rank, std::string& text) {
  if (!self_.heals || self_.elastic() || !is_member(node_rank) || !runs() ||
      store_.check(round_key(round_, "verdict")) ||
      (!self_.shrinks && free_spares() <= 0)) {
    return false;
  }
  if (store_.add(round_key(round_, "heals"), 0) !=
      static_cast<int64_t>(members_.size())) {
    text +=
        "; this is not healed: a rank has not said that its training can be, "
        "or has state that no other rank has";
    return false;
  }
  if (store_.add(round_key(round_, "succeeded"), 0) > 0) {
    text += "; this is not healed: the workers of a node have ended";
    return false;
  }
  if (count_given_up() + !was_given_up(node_rank) ==
      static_cast<int64_t>(members_.size())) {
    text += "; this is not healed: no rank is left";
    return false;
  }
  return true;
}

// Whether the round goes on without all workers of this node.
bool NodeProtocol::was_given_up(int node_rank) {
  return store_.check(round_key(round_, given_up_leaf(node_rank)));
}

int64_t NodeProtocol::count_given_up() {
  return std::ranges::count_if(members_,
                               [this](int rank) { return was_given_up(rank); });
}

std::optional<std::string> NodeProtocol::loss_of(
    int node_rank, const std::set<std::string>& accepted) {
  const auto beat = store_.get(node_key("beat", node_rank));
  if (!beat || store_.check(node_key("departed", node_rank))) {
    heard_.erase(node_rank);
    return std::nullopt;
  }
  Heard& heard = heard_[node_rank];
  note_silence(node_rank, heard, heard.beat != *beat);
  if (heard.beat != *beat) {
    heard.beat = *beat;
    heard.since = awake_.awake();
  }
  if (awake_.awake() - heard.since >= self_.keep_alive.allowance()) {
    return "its agent has shown no sign of life for " +
           seconds_text(self_.keep_alive.allowance());
  }
  const auto connection = store_.get(node_key("connection", node_rank));
  const bool connected = connection && accepted.count(*connection) > 0;
  // A connection that was never seen open has another name here, since a
  // gateway lies between.
  if (heard.connected && !connected) {
    return "its connection is closed";
  }
  heard.connected = connected;
  return std::nullopt;
}

// Tells that a node is silent, and later that it is back.
void NodeProtocol::note_silence(int node_rank, Heard& heard, bool ends) {
  const auto silence = awake_.awake() - heard.since;
  if (heard.told != ends || (!ends && silence < kLongSilence)) return;
  heard.told = !ends;
  const std::string time =
      seconds_text(std::chrono::round<std::chrono::seconds>(silence));
  notices_.push_back(
      heard.told ? "no sign of life from " + name_of(node_rank) + " for " +
                       time + ": the workers go on; it counts as lost after " +
                       seconds_text(self_.keep_alive.allowance())
                 : name_of(node_rank) + " is back after " + time);
}

void NodeProtocol::give_up(int node_rank, const std::string& loss,
                           Clock::time_point now) {
  std::string text = name_of(node_rank) + " was lost: " + loss;
  text += own_pause(awake_, self_.keep_alive, name_of(node_rank_));
  // Before the plan of a later round, another node can still take its place.
  const bool takes_part =
      self_.elastic()
          ? is_member(node_rank)
          : offered_ &&
                (round_ == 0 || store_.check(round_key(round_, "plan"))) &&
                store_.check(
                    round_key(round_, "node/" + std::to_string(node_rank)));
  if (takes_part && may_go_on_without(node_rank, text)) {
    if (was_given_up(node_rank) || free_spares() <= 0) {
      return go_on_without(node_rank, text);
    }
    lost_[node_rank] = {.text = text, .until = now + kReplacedWithin};
    store_.set(round_key(round_, loss_leaf(node_rank)),
               record_text(json{{"text", text}, {"generation", 0}}));
    store_.remove(round_key(round_, "node/" + std::to_string(node_rank)));
    notices_.push_back(text + "; a spare node takes its place");
    return vacate(node_rank);
  }
  // While nodes may come, another must not take the rank before the round ends.
  if (!self_.elastic()) vacate(node_rank);
  if (!takes_part) {
    notices_.push_back(text + "; another node may take its place");
  } else if (!verdict_given_) {
    fail_round(node_rank, text);
  }
  if (self_.elastic()) vacate(node_rank);
}

// Keeps the rank taken until the round has ended: no other node takes part in
// it.
void NodeProtocol::go_on_without(int node_rank, const std::string& text) {
  given_up_.push_back(node_rank);
  store_.set(round_key(round_, loss_leaf(node_rank)),
             record_text(json{{"text", text}, {"generation", 0}}));
  store_.set(
      node_key("node", node_rank),
      record_text(json{{"host", "given up"}, {"pid", 0}, {"id", "given up"}}));
  forget(node_rank);
  if (was_given_up(node_rank)) return;
  store_.set(round_key(round_, given_up_leaf(node_rank)), "1");
  lost_nodes_.push_back({text, places_of(node_rank)});
}

// Returns the places of a node in the round that runs.
std::vector<int> NodeProtocol::places_of(int node_rank) const {
  const auto at = std::ranges::find(members_, node_rank) - members_.begin();
  const auto own = workers_.begin() + at;
  std::vector<int> places(static_cast<size_t>(*own));
  std::iota(places.begin(), places.end(),
            std::accumulate(workers_.begin(), own, 0));
  return places;
}

std::optional<LostNode> NodeProtocol::take_lost_node() {
  if (lost_nodes_.empty()) return std::nullopt;
  LostNode node = std::move(lost_nodes_.front());
  lost_nodes_.erase(lost_nodes_.begin());
  return node;
}

void NodeProtocol::free_ranks_given_up() {
  for (const int rank : std::exchange(given_up_, {})) vacate(rank);
}

void NodeProtocol::fail_round(int node_rank, const std::string& text) {
  Verdict verdict;
  verdict.kind =
      self_.elastic() ? Verdict::Kind::node_lost : Verdict::Kind::failed;
  verdict.node_rank = node_rank;
  verdict.exit_code = kSystemError;
  verdict.text = text;
  propose(round_, verdict);
}

void NodeProtocol::forget(int node_rank) {
  heard_.erase(node_rank);
  store_.remove(node_key("beat", node_rank));
  store_.remove(node_key("connection", node_rank));
}

void NodeProtocol::vacate(int node_rank) {
  forget(node_rank);
  // Once this key is gone, another agent may take the rank.
  store_.remove(node_key("node", node_rank));
  store_.add(kVacanciesKey, 1);
}

}  // namespace lockstep::internal

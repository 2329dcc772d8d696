#include "lockstep/launch/nodes/node_protocol.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/launch/nodes/node_records.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr int kVersion = 5;
// How often the host of the store looks for lost nodes.
constexpr milliseconds kLookInterval{500};
// How often a node shows that it lives, so that it is silent for hardly longer
// than the network is cut.
constexpr milliseconds kBeatInterval{1000};
constexpr int kMostArrivals = 1 << 30;
constexpr size_t kMostNamed = 8;
constexpr size_t kNamedText = 500;

const std::string kJob = kStorePrefix + "job";
const std::string kClosed = kStorePrefix + "closed";
const std::string kStoreHost = kStorePrefix + "store_host";
const std::string kRound = kStorePrefix + "round";
const std::string kArrivals = kStorePrefix + "arrivals";

std::string workers_text(int workers, const std::string& role) {
  return std::to_string(workers) +
         (workers == 1 ? " worker of role " : " workers of role ") + role;
}

// Returns "3" or "2:4", as --nnodes is written.
std::string range_text(int fewest, int most) {
  return (fewest < most ? std::to_string(fewest) + ":" : "") +
         std::to_string(most);
}

std::string healing_of(const NodeDescription& node) {
  return !node.heals ? "false" : node.shrinks ? "shrink" : "replace";
}

std::string limit_text(const std::optional<int>& limit) {
  return limit ? std::to_string(*limit) : "unlimited";
}

}  // namespace

std::string random_id() { return random_digits(32); }

std::string own_pause(const AwakeClock& awake, const KeepAlive& keep_alive,
                      const std::string& name) {
  const auto pause = awake.recent_pause(keep_alive.allowance());
  if (pause < keep_alive.longest_step()) return {};
  return "; the agent of " + name + " itself did not run for " +
         seconds_text(std::chrono::duration_cast<milliseconds>(pause)) +
         ", so that others may have given it up";
}

Membership NodeProtocol::join() {
  if (store_.check(kClosed)) throw JobClosed();
  if (self_.is_spare && self_.earlier.waited && !store_.check(kJob)) {
    throw RankTaken("the nodes of the job have not come");
  }
  agree_on_job();
  if (self_.is_spare) wait_as_spare();
  let_members_come_first();
  claim_rank();
  remove_spare_key();
  if (self_.hosts_store) store_.set(kStoreHost, std::to_string(node_rank_));
  beat(Clock::now());
  Start start = current_round();
  if (start.round == self_.earlier.lost_round &&
      !store_.check(round_key(start.round, loss_leaf(node_rank_)))) {
    end_lost_round(start);
  }
  round_ = start.round;
  changes_ = next_changes_ = start.changes;
  if (const auto& running = self_.earlier.running;
      running && round_ == self_.earlier.count) {
    resume(*running);
  }
  return {node_rank_, run_id_, round_, changes_};
}

// While the members of a round that goes on have not all come, their ranks are
// free. A member that has ended its workers comes to end the round.
void NodeProtocol::let_members_come_first() {
  if (job_goes_on_ && !self_.earlier.running &&
      self_.earlier.lost_round != first_round_ && !has_begun()) {
    throw RankTaken("the nodes of the job have not come");
  }
}

void NodeProtocol::resume(const RunningRound& running) {
  offered_ = plan_given_ = true;
  plan_ = running.plan;
  read_members(StoreRecord(round_key(round_, "plan"), plan_));
  write_offer({}, running.generation);
  report_healing();
  if (self_.hosts_store) gathers_until_ = Clock::now() + kReplacedWithin;
}

// Throws RankTaken unless a rank may be free for this spare node.
void NodeProtocol::wait_as_spare() {
  if (spare_key_.empty()) {
    const int64_t number = store_.add(kSparesKey, 1) - 1;
    spare_key_ = kStorePrefix + "spare/" + std::to_string(number);
    store_.set(spare_key_, self_.connection);
  }
  if (!has_begun()) return wait_for_members();
  const std::string where = round_key(first_round_, "plan");
  const StoreRecord plan(where, store_.get(where).value_or(""));
  std::string nodes;
  for (const StoreRecord& run : plan.list("nodes")) {
    const int workers = run.number("nproc_per_node", 1, kMostWorkers);
    if (workers == self_.nproc_per_node &&
        run.text("role") == as_recorded(self_.role)) {
      return;
    }
    nodes = workers_text(workers, run.text("role"));
  }
  refuse_workers("nodes of this job have " + nodes);
}

// If the job has moved to this store, its nodes come first: they may want their
// own ranks.
void NodeProtocol::wait_for_members() {
  if (first_round_ == 0 || job_goes_on_) {
    throw RankTaken("the job has not begun");
  }
  if (!waits_since_) waits_since_ = Clock::now();
  int absent = 0;
  for (int rank = 0; rank < job_nnodes_; ++rank) {
    absent += !store_.check(node_key("node", rank));
  }
  if (absent > 1 && Clock::now() - *waits_since_ < kReplacedWithin) {
    throw RankTaken("the nodes of the job have not come");
  }
}

void NodeProtocol::refuse_workers(const std::string& of_others) const {
  throw JobRefused(of_others + ", and this spare node has " +
                   workers_text(self_.nproc_per_node, self_.role) +
                   "; give all nodes the same --nproc-per-node and --role");
}

void NodeProtocol::await_free_rank(std::chrono::milliseconds allowed,
                                   int wake_fd) {
  store_.await_change({kVacanciesKey, kClosed}, allowed, wake_fd);
}

Verdict NodeProtocol::last_verdict() {
  const std::string where = round_key(current_round().round, "verdict");
  const auto text = store_.get(where);
  remove_spare_key();
  return text ? parse_verdict(where, *text) : Verdict{};
}

void NodeProtocol::remove_spare_key() {
  if (!spare_key_.empty()) store_.remove(std::exchange(spare_key_, ""));
}

// Throws RankTaken if the round goes on without this node.
void NodeProtocol::require_own_rank() {
  if (!self_.heals || !runs() ||
      !store_.check(round_key(round_, loss_leaf(node_rank_))) ||
      store_.get(node_key("node", node_rank_)) == own_record()) {
    return;
  }
  throw RankTaken("node " + std::to_string(node_rank_) + " (" + self_.host +
                  ") was given up as lost, and the job goes on without it; to "
                  "take part again, start it with --spare");
}

// This node was cut off for so long that it has ended its workers, but the
// others have not given it up yet.
void NodeProtocol::end_lost_round(Start& start) {
  changes_ = start.changes;
  Verdict verdict;
  verdict.kind =
      self_.elastic() ? Verdict::Kind::node_lost : Verdict::Kind::failed;
  verdict.node_rank = node_rank_;
  verdict.exit_code = kSystemError;
  verdict.text = name_of(node_rank_) + " was lost: it had no contact for " +
                 seconds_text(self_.keep_alive.allowance());
  propose(start.round, verdict);
  start = current_round();
}

void NodeProtocol::decline(const Verdict& verdict) {
  if (store_.check(kClosed)) throw JobClosed();
  declined_ = true;
  job_nnodes_ = self_.nnodes;
  if (const auto job = store_.get(kJob)) {
    const StoreRecord record(kJob, *job);
    job_nnodes_ = record.number("nnodes", 1, kMostNodes);
    job_fewest_ = record.number("min_nodes", 1, job_nnodes_);
    first_round_ = record.number("first_round", 0, kMostRounds);
    job_goes_on_ = record.number("goes_on", 0, 1) == 1;
    // The others can do without this node.
    if (job_fewest_ < job_nnodes_ && has_begun()) return;
  }
  end_forming_round(current_round().round, verdict);
}

// Returns whether the first round has begun.
bool NodeProtocol::has_begun() {
  return store_.check(round_key(first_round_, "plan"));
}

// Returns the round that is being formed or runs. If the last round has failed,
// this is the next one, although no node may have offered it yet.
NodeProtocol::Start NodeProtocol::current_round() {
  Start start{.round = first_round_, .changes = self_.earlier.changes};
  if (const auto job = store_.get(kJob)) {
    start.changes = changes_in(StoreRecord(kJob, *job));
  }
  if (const auto text = store_.get(kRound)) {
    start.round = StoreRecord(kRound, *text).number("number", 0, kMostRounds);
    const std::string where = round_key(start.round - 1, "verdict");
    if (const auto verdict = store_.get(where)) {
      start.changes = parse_verdict(where, *verdict).changes;
    }
  }
  while (true) {
    const std::string where = round_key(start.round, "verdict");
    const auto text = store_.get(where);
    if (!text) return start;
    const Verdict verdict = parse_verdict(where, *text);
    if (verdict.ends_job(self_.limits())) return start;
    start.changes = verdict.changes;
    ++start.round;
  }
}

std::string NodeProtocol::own_record() const {
  return record_text(
      json{{"host", self_.host}, {"pid", self_.pid}, {"id", self_.id}});
}

void NodeProtocol::agree_on_job() {
  const std::string me = self_.host + ", pid " + std::to_string(self_.pid);
  const std::string own_id = self_.run_id.value_or(random_id());
  const json own{
      {"version", kVersion},
      {"nnodes", self_.nnodes},
      {"min_nodes", self_.fewest()},
      {"max_restarts", self_.max_restarts},
      {"heals", healing_of(self_)},
      {"goes_on", self_.earlier.running ? 1 : 0},
      {"max_membership_changes", self_.max_membership_changes.value_or(-1)},
      {"run_id", own_id},
      {"first_round", self_.earlier.count},
      {"restarts", self_.earlier.changes.restarts},
      {"membership_changes", self_.earlier.changes.membership_changes},
      {"first_agent", me}};
  const StoreRecord job(kJob, store_.set_if_absent(kJob, record_text(own)));
  job.number("version", kVersion, kVersion);
  job_nnodes_ = job.number("nnodes", 1, kMostNodes);
  job_fewest_ = job.number("min_nodes", 1, job_nnodes_);
  const int max_restarts = job.number("max_restarts", 0, 1'000'000);
  const std::string heals = job.text("heals");
  const int most_changes = job.number("max_membership_changes", -1, 1'000'000);
  first_round_ = job.number("first_round", 0, kMostRounds);
  job_goes_on_ = job.number("goes_on", 0, 1) == 1;
  run_id_ = job.text("run_id");
  if (self_.earlier.any() && self_.run_id && as_recorded(own_id) != run_id_) {
    // The nodes of another job have met here since. They are not disturbed.
    throw JobRefused("the job of the agent on " + me +
                     " has ended, and another one is at its endpoint");
  }
  const auto refuse_if = [&](bool differs, const std::string& option,
                             const std::string& mine,
                             const std::string& theirs) {
    if (!differs) return;
    refuse("the agent on " + me + " was started with " + option + "=" + mine +
           ", the one on " + job.text("first_agent") + " with " + option + "=" +
           theirs + "; give every node the same");
  };
  refuse_if(self_.run_id && as_recorded(own_id) != run_id_, "--rdzv-id", own_id,
            run_id_);
  refuse_if(job_nnodes_ != self_.nnodes || job_fewest_ != self_.fewest(),
            "--nnodes", range_text(self_.fewest(), self_.nnodes),
            range_text(job_fewest_, job_nnodes_));
  refuse_if(max_restarts != self_.max_restarts, "--max-restarts",
            std::to_string(self_.max_restarts), std::to_string(max_restarts));
  refuse_if(heals != healing_of(self_), "--heal", healing_of(self_), heals);
  const auto theirs =
      most_changes < 0 ? std::nullopt : std::optional(most_changes);
  refuse_if(self_.max_membership_changes != theirs, "--max-membership-changes",
            limit_text(self_.max_membership_changes), limit_text(theirs));
}

void NodeProtocol::claim_rank() {
  const std::string me = own_record();
  const auto place = [](const StoreRecord& node) {
    return node.text("host") + ", pid " +
           std::to_string(node.number("pid", 0, 1 << 30));
  };
  const std::string mine = self_.host + ", pid " + std::to_string(self_.pid);
  const std::optional<int> own = self_.earlier.running
                                     ? self_.earlier.running->node_rank
                                     : self_.node_rank;
  if (own) {
    const std::string where = node_key("node", *own);
    const std::string holder = store_.set_if_absent(where, me);
    if (holder != me && store_.check(node_key("departed", *own))) {
      throw JobClosed();  // an earlier launch of this node took the rank
    }
    if (holder != me) {
      refuse_rank("two agents have --node-rank=" + std::to_string(*own) +
                  ": the one on " + place(StoreRecord(where, holder)) +
                  " and the one on " + mine +
                  "; give each node its own rank, or none if they need no "
                  "order");
    }
    node_rank_ = *own;
    return;
  }
  // Looking at every rank from 0 on would cost each of many nodes a number of
  // requests that grows with them.
  const int guess = guess_free_rank();
  for (int look = -1; look < job_nnodes_; ++look) {
    const int rank = look < 0 ? guess : look;
    if (rank < job_nnodes_ &&
        store_.set_if_absent(node_key("node", rank), me) == me) {
      node_rank_ = rank;
      return;
    }
  }
  refuse_rank("the agent on " + mine + " is one too many: all " +
              std::to_string(job_nnodes_) +
              " nodes of this job have come; raise --nnodes, or name another "
              "endpoint");
}

// Returns the number of agents without a rank of their own that came before
// this one. An agent that joins again gets the same answer, so that it finds
// the rank that it has taken.
int NodeProtocol::guess_free_rank() {
  const std::string where = kStorePrefix + "arrival/" + self_.id;
  auto arrival = store_.get(where);
  if (!arrival) {
    arrival = record_text(json{{"number", store_.add(kArrivals, 1) - 1}});
    store_.set(where, *arrival);
  }
  return StoreRecord(where, *arrival).number("number", 0, kMostArrivals);
}

void NodeProtocol::refuse(const std::string& reason) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::declined;
  verdict.exit_code = kUsageError;
  verdict.text = reason;
  // This ends the first round only: the nodes of a later round have agreed
  // already, and wait for one that was lost.
  end_forming_round(first_round_, verdict);
  throw JobRefused(reason);
}

void NodeProtocol::refuse_rank(const std::string& reason) {
  if (has_begun() && (self_.max_restarts > 0 || self_.elastic())) {
    throw RankTaken(reason);
  }
  refuse(reason);
}

// Ends the wait of nodes that would wait in vain. Does not disturb a job that
// runs.
void NodeProtocol::end_forming_round(int round, const Verdict& verdict) {
  if (!job_goes_on_ && !store_.check(round_key(round, "plan"))) {
    propose(round, verdict);
  }
}

void NodeProtocol::offer_round(int round, const RoundOffer& offer) {
  const std::string where = node_key("node", node_rank_);
  const std::string holder = store_.set_if_absent(where, own_record());
  if (holder != own_record()) {
    const std::string reason =
        "node " + std::to_string(node_rank_) + " (" + self_.host +
        ") was given up as lost, and an agent on " +
        StoreRecord(where, holder).text("host") + " has its rank";
    if (!self_.node_rank) throw RankTaken(reason);
    throw JobRefused(reason);
  }
  if (round != round_) {
    changes_ = next_changes_;
    question_given_ = false;
    verdict_given_ = false;
  }
  round_ = round;
  offered_ = true;
  came_late_ = self_.elastic() && store_.check(round_key(round, "plan"));
  members_.clear();
  excluded_ = false;
  plan_given_ = false;
  healings_ = 0;
  lost_.clear();
  lost_nodes_.clear();
  write_offer(offer, 0);
  const int64_t offers = store_.add(round_key(round, "offers"), 1);
  if (!self_.elastic() && offers >= self_.nnodes &&
      !store_.check(round_key(round, "plan"))) {
    propose_plan();
  }
}

void NodeProtocol::write_offer(const RoundOffer& offer, int generation) {
  if (!self_.connection.empty()) {
    store_.set(node_key("connection", node_rank_), self_.connection);
  }
  // Tells a replacement for a lost node which round to join.
  if (round_ > 0) store_.set(kRound, record_text(json{{"number", round_}}));
  store_.set(round_key(round_, "node/" + std::to_string(node_rank_)),
             record_text(json{{"id", self_.id},
                              {"place", last_place_},
                              {"placed", last_round_},
                              {"nproc_per_node", self_.nproc_per_node},
                              {"role", self_.role},
                              {"master_addr", offer.master_addr},
                              {"master_port", offer.master_port},
                              {"generation", generation}}));
}

// The node that offers last writes one plan for all, so that the cost of a
// round grows with the number of nodes, and not with its square.
void NodeProtocol::propose_plan() {
  std::vector<NodeOffer> members;
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    // If the node was lost after it had offered, another may take its place,
    // and then offers last.
    const auto node = store_.get(node_key("node", rank));
    if (!node) return;
    const std::string where = round_key(round_, "node/" + std::to_string(rank));
    members.push_back(parse_offer(rank, where, store_.get(where).value_or("")));
    if (members.back().id !=
        StoreRecord(node_key("node", rank), *node).text("id"))
      return;
  }
  store_.set_if_absent(round_key(round_, "plan"), plan_text(members));
}

std::optional<RoundPlan> NodeProtocol::take_plan() {
  if (!offered_ || plan_given_) return std::nullopt;
  const std::string where = round_key(round_, "plan");
  const auto text = store_.get(where);
  if (!text) return std::nullopt;
  plan_ = *text;
  const StoreRecord record(where, plan_);
  const std::string role = as_recorded(self_.role);
  const std::vector<NodeRun> runs = read_members(record);
  const int nnodes = static_cast<int>(members_.size());
  if (nnodes < self_.fewest()) refuse_record(where);
  last_nodes_ = nnodes;
  RoundPlan plan;
  plan.round = round_;
  plan.restarts_used = changes_.restarts;
  plan.master_addr = record.text("master_addr");
  plan.master_port = record.number("master_port", 1, 65535);
  plan_given_ = true;
  // Notes the open connections now, before a node has a reason to die:
  // loss_of() recognises a closed connection only if it has seen it open.
  if (self_.hosts_store) look_for_lost_nodes(Clock::now());
  if (!is_member(node_rank_) || came_late_) {
    excluded_ = true;
    return std::nullopt;
  }
  NodePlace& place = plan.place;
  place = NodePlace::alone(0);
  place.node_rank = static_cast<int>(std::ranges::find(members_, node_rank_) -
                                     members_.begin());
  place.nnodes = nnodes;
  int rank = 0;
  for (const NodeRun& run : runs) {
    const int before = std::clamp(place.node_rank - rank, 0, run.nodes);
    const bool same_role = run.role == role;
    const bool is_own =
        place.node_rank >= rank && place.node_rank < rank + run.nodes;
    place.first_rank += before * run.workers;
    if (same_role) place.first_role_rank += before * run.workers;
    place.world_size += run.nodes * run.workers;
    if (same_role) place.role_world_size += run.nodes * run.workers;
    rank += run.nodes;
    // The plan may be that of a lost node whose place this one has taken.
    if (is_own && (run.workers != self_.nproc_per_node || !same_role)) {
      refuse_workers("node " + std::to_string(node_rank_) +
                     " was lost, which had " +
                     workers_text(run.workers, run.role));
    }
  }
  const std::string lost = round_key(round_, loss_leaf(node_rank_));
  if (const auto loss = store_.get(lost)) {
    const StoreRecord told(lost, *loss);
    plan.lost_node = told.text("text");
    plan.generation = told.number("generation", 0, kMostRounds);
  }
  last_place_ = place.node_rank;
  last_round_ = round_;
  return plan;
}

// Sets members_ and workers_.
std::vector<NodeRun> NodeProtocol::read_members(const StoreRecord& plan) {
  std::vector<NodeRun> runs;
  members_.clear();
  workers_.clear();
  for (const StoreRecord& run : plan.list("nodes")) {
    const int known = static_cast<int>(members_.size());
    const int nodes = run.number("count", 1, self_.nnodes - known);
    const int first = run.number("first", 0, self_.nnodes - nodes);
    runs.push_back({nodes, run.number("nproc_per_node", 1, kMostWorkers),
                    run.text("role")});
    for (int at = 0; at < nodes; ++at) {
      members_.push_back(first + at);
      workers_.push_back(runs.back().workers);
    }
  }
  return runs;
}

bool NodeProtocol::take_exclusion() { return std::exchange(excluded_, false); }

bool NodeProtocol::is_member(int node_rank) const {
  return std::ranges::find(members_, node_rank) != members_.end();
}

EarlierRounds NodeProtocol::earlier() const {
  return {.count = round_ + 1,
          .changes = verdict_given_ ? next_changes_ : changes_,
          .nodes = last_nodes_,
          .last_place = last_place_,
          .last_round = last_round_,
          .lost_round = runs() ? round_ : -1};
}

std::optional<RunningRound> NodeProtocol::running_round() const {
  if (!self_.heals || self_.elastic() || !runs() || !is_member(store_host_) ||
      self_.hosts_store) {
    return std::nullopt;
  }
  return RunningRound{
      .plan = plan_, .node_rank = node_rank_, .lost_node = store_host_};
}

std::vector<int> NodeProtocol::absent_nodes() {
  std::vector<int> absent;
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    if (!store_.check(node_key("node", rank)) ||
        !store_.check(round_key(round_, "node/" + std::to_string(rank)))) {
      absent.push_back(rank);
    }
  }
  return absent;
}

void NodeProtocol::report_healing() {
  store_.add(round_key(round_, "heals"), 1);
}

void NodeProtocol::report_given_up() {
  store_.set(round_key(round_, given_up_leaf(node_rank_)), "1");
}

void NodeProtocol::report_success() {
  store_.add(round_key(round_, "succeeded"), 1);
  propose_success();
}

// Ends the round if the workers of every node have ended well or were given up.
void NodeProtocol::propose_success() {
  if (!plan_given_) return;
  auto done = store_.add(round_key(round_, "succeeded"), 0);
  // Only one node asks about each of the others, so that the cost of that does
  // not grow with the square of their number.
  if (done > 0 && self_.shrinks && self_.hosts_store) done += count_given_up();
  if (done >= static_cast<int64_t>(members_.size())) {
    propose(round_, Verdict{});
  }
}

void NodeProtocol::report_snapshot() {
  rules_.note_snapshot();
  next_look_ = {};
}

void NodeProtocol::ask_for_cause(const NamedRanks& named) {
  json ranks = json::array();
  for (const auto& [rank, text] : named) {
    ranks.push_back({{"rank", rank}, {"text", text.substr(0, kNamedText)}});
    if (ranks.size() == kMostNamed) break;
  }
  store_.set_if_absent(round_key(round_, "named"),
                       record_text(json{{"ranks", ranks}}));
  store_.add(round_key(round_, "questions"), 1);
}

std::optional<NamedRanks> NodeProtocol::take_question() {
  if (question_given_ || verdict_given_ || !plan_given_) return std::nullopt;
  question_given_ = store_.add(round_key(round_, "questions"), 0) > 0;
  if (!question_given_) return std::nullopt;
  NamedRanks named;
  const std::string where = round_key(round_, "named");
  if (const auto text = store_.get(where)) {
    for (const StoreRecord& one : StoreRecord(where, *text).list("ranks")) {
      named.emplace(one.number("rank", 0, kMostNodes * kMostWorkers),
                    one.text("text"));
    }
  }
  return named;
}

void NodeProtocol::propose(int round, const Verdict& verdict) {
  require_own_rank();
  Verdict counted = verdict;
  if (round == round_) counted.healings = std::max(counted.healings, healings_);
  counted.changes = counted.after(changes_);
  store_.set_if_absent(round_key(round, "verdict"), verdict_text(counted));
}

std::optional<Verdict> NodeProtocol::take_verdict() {
  if (verdict_given_) return std::nullopt;
  // A success is also written as the verdict: a node that gets a signal now
  // must not end in another way.
  propose_success();
  const std::string where = round_key(round_, "verdict");
  const auto text = store_.get(where);
  if (!text) return std::nullopt;
  verdict_given_ = true;
  auto verdict = parse_verdict(where, *text);
  next_changes_ = verdict.changes;
  note_failing_node(verdict);
  free_ranks_given_up();
  job_ended_ = verdict.ends_job(self_.limits());
  declined_ = verdict.kind == Verdict::Kind::declined;
  return verdict;
}

void NodeProtocol::await_news(std::chrono::milliseconds allowed, int wake_fd) {
  std::vector<std::string> keys{round_key(round_, "plan"),
                                round_key(round_, "questions"),
                                round_key(round_, "verdict")};
  if (self_.hosts_store && self_.elastic()) {
    keys.push_back(round_key(round_, "offers"));
  }
  store_.await_change(keys, allowed, wake_fd);
}

void NodeProtocol::beat(Clock::time_point now) {
  awake_.tick(now);
  last_beat_ = now;
  if (now >= next_beat_ && node_rank_ >= 0) {
    next_beat_ = now + std::min(self_.keep_alive.interval, kBeatInterval);
    require_own_rank();
    store_.set(node_key("beat", node_rank_), std::to_string(++beats_));
  }
  if (!self_.hosts_store) return;
  const bool looks = now >= next_look_;
  if (looks) {
    next_look_ = now + kLookInterval;
    look_for_lost_nodes(now);
    gather_members(now);
    look_for_replacements(now);
  }
  if (self_.elastic()) keep_members(now, looks);
}

std::optional<std::string> NodeProtocol::take_notice() {
  if (notices_.empty()) return std::nullopt;
  std::string notice = std::move(notices_.front());
  notices_.erase(notices_.begin());
  return notice;
}

void NodeProtocol::depart() {
  if (job_ended_ || self_.hosts_store) {
    // If the job has not begun, the store stays open: nodes that come later
    // must be told why.
    if (has_begun()) store_.set(kClosed, "1");
    if (node_rank_ >= 0) store_.set(node_key("departed", node_rank_), "1");
  } else if (node_rank_ >= 0 &&
             store_.get(node_key("node", node_rank_)) == own_record()) {
    vacate(node_rank_);
  }
}

bool NodeProtocol::others_have_departed() {
  int departed =
      node_rank_ >= 0 && store_.check(node_key("departed", node_rank_));
  int joined = 0;
  for (int rank = 0; rank < job_nnodes_; ++rank) {
    if (rank == node_rank_) continue;
    if (store_.check(node_key("departed", rank))) {
      ++departed;
    } else if (store_.check(node_key("node", rank))) {
      ++joined;
    }
  }
  // A node that declined without joining has no rank and is not waited for.
  return joined == 0 && spares().empty() &&
         (!declined_ || departed >= job_nnodes_ - 1);
}

std::string NodeProtocol::name_of_those_left() {
  std::string names;
  for (int rank = 0; rank < job_nnodes_; ++rank) {
    if (rank != node_rank_ && store_.check(node_key("node", rank)) &&
        !store_.check(node_key("departed", rank))) {
      names += (names.empty() ? "" : " and ") + name_of(rank);
    }
  }
  return names;
}

bool NodeProtocol::others_have_gone_on() {
  return !plan_given_ || store_.add(round_key(round_ + 1, "offers"), 0) + 1 >=
                             static_cast<int64_t>(members_.size());
}

std::string NodeProtocol::name_of(int node_rank) {
  const std::string name = "node " + std::to_string(node_rank);
  const std::string where = node_key("node", node_rank);
  const auto node = store_.get(where);
  return node ? name + " (" + StoreRecord(where, *node).text("host") + ")"
              : name;
}

std::string NodeProtocol::name_of_store_host() {
  const auto rank = store_.get(kStoreHost);
  if (!rank || rank->empty() || rank->size() > 5 ||
      rank->find_first_not_of("0123456789") != std::string::npos) {
    return {};
  }
  store_host_ = std::stoi(*rank);
  return name_of(store_host_);
}

}  // namespace lockstep::internal

#include "lockstep/launch/node_protocol.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/launch/exit_code.h"
#include "lockstep/launch/seconds_text.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr int kVersion = 2;
// How often the host of the store looks for lost nodes.
constexpr milliseconds kLookInterval{500};
constexpr int kMostNodes = 65536;
constexpr int kMostWorkers = 4096;
constexpr int kMostArrivals = 1 << 30;
constexpr size_t kLongestText = 4000;

const std::string kPrefix = "lockstep/";
const std::string kJob = kPrefix + "job";
const std::string kClosed = kPrefix + "closed";
const std::string kStoreHost = kPrefix + "store_host";
const std::string kRound = kPrefix + "round";
const std::string kArrivals = kPrefix + "arrivals";

std::string key(const std::string& leaf, int node_rank) {
  return kPrefix + leaf + "/" + std::to_string(node_rank);
}

[[noreturn]] void refuse_record(const std::string& where) {
  throw ForeignRecord(
      "the agents' store holds a record at " + where +
      " that no agent of this version wrote; if another program "
      "uses this endpoint, name another one");
}

// A record from the store. The store has no authentication, so every field is
// checked.
class Record {
 public:
  Record(std::string where, const std::string& text)
      : Record(std::move(where),
               json::parse(text, nullptr, /*allow_exceptions=*/false)) {}

  int number(const char* name, int lowest, int highest) const {
    const auto found = json_.find(name);
    if (found == json_.end() || !found->is_number_integer()) {
      refuse_record(where_);
    }
    const auto value = found->get<int64_t>();
    if (value < lowest || value > highest) refuse_record(where_);
    return static_cast<int>(value);
  }

  std::string text(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end() || !found->is_string()) refuse_record(where_);
    auto value = found->get<std::string>().substr(0, kLongestText);
    for (char& c : value) {
      if (static_cast<unsigned char>(c) < ' ') c = ' ';
    }
    return value;
  }

  // Returns the records of an array.
  std::vector<Record> list(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end() || !found->is_array()) refuse_record(where_);
    std::vector<Record> records;
    for (const json& entry : *found) records.push_back(Record(where_, entry));
    return records;
  }

 private:
  Record(std::string where, json record)
      : where_(std::move(where)), json_(std::move(record)) {
    if (!json_.is_object()) refuse_record(where_);
  }

  std::string where_;
  json json_;
};

// Bytes that are not UTF-8 (a host's name may be anything) become replacement
// characters.
std::string dump(const json& record) {
  return record.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string dump(const Verdict& verdict) {
  return dump(json{{"kind", static_cast<int>(verdict.kind)},
                   {"node_rank", verdict.node_rank},
                   {"exit_code", verdict.exit_code},
                   {"signal", verdict.signal},
                   {"text", verdict.text.substr(0, kLongestText)}});
}

Verdict parse_verdict(const std::string& where, const std::string& text) {
  const Record record(where, text);
  Verdict verdict;
  verdict.kind = static_cast<Verdict::Kind>(
      record.number("kind", 0, static_cast<int>(Verdict::Kind::declined)));
  verdict.node_rank = record.number("node_rank", -1, kMostNodes);
  verdict.exit_code = record.number("exit_code", 0, 255);
  verdict.signal = record.number("signal", 0, 64);
  verdict.text = record.text("text");
  return verdict;
}

// Returns what Record::text() would read back for `text`, so that the two can
// be compared.
std::string as_recorded(const std::string& text) {
  return Record("", dump(json{{"text", text}})).text("text");
}

}  // namespace

std::string random_id() {
  std::ifstream source("/proc/sys/kernel/random/uuid");
  std::string id;
  std::getline(source, id);
  return id.empty() ? "none" : id;
}

std::string own_pause(const AwakeClock& awake, const KeepAlive& keep_alive,
                      const std::string& name) {
  const auto pause = awake.recent_pause(keep_alive.allowance());
  if (pause < keep_alive.longest_step()) return {};
  return "; the agent of " + name + " itself did not run for " +
         seconds_text(std::chrono::duration_cast<milliseconds>(pause)) +
         ", so that others may have given it up";
}

std::string NodeProtocol::round_key(int round, const std::string& leaf) const {
  return kPrefix + "round/" + std::to_string(round) + "/" + leaf;
}

Membership NodeProtocol::join() {
  if (store_.check(kClosed)) throw JobClosed();
  agree_on_job();
  claim_rank();
  if (self_.hosts_store) store_.set(kStoreHost, std::to_string(node_rank_));
  beat(Clock::now());
  round_ = current_round();
  return {node_rank_, run_id_, round_};
}

void NodeProtocol::decline(const Verdict& verdict) {
  if (store_.check(kClosed)) throw JobClosed();
  declined_ = true;
  job_nnodes_ = self_.nnodes;
  if (const auto job = store_.get(kJob)) {
    job_nnodes_ = Record(kJob, *job).number("nnodes", 1, kMostNodes);
  }
  end_forming_round(current_round(), verdict);
}

// Returns whether every node has offered the first round.
bool NodeProtocol::has_begun() {
  return store_.add(round_key(0, "offers"), 0) >= job_nnodes_;
}

// Returns the round that is being formed or runs. If the last round has failed,
// this is the next one, although no node may have offered it yet.
int NodeProtocol::current_round() {
  const auto text = store_.get(kRound);
  int round = text ? Record(kRound, *text).number("number", 0, 1'000'000) : 0;
  while (true) {
    const std::string where = round_key(round, "verdict");
    const auto verdict = store_.get(where);
    if (!verdict ||
        parse_verdict(where, *verdict).ends_job(round, self_.max_restarts)) {
      return round;
    }
    ++round;
  }
}

std::string NodeProtocol::own_record() const {
  return dump(json{{"host", self_.host}, {"pid", self_.pid}, {"id", self_.id}});
}

void NodeProtocol::agree_on_job() {
  const std::string me = self_.host + ", pid " + std::to_string(self_.pid);
  const std::string own_id = self_.run_id.value_or(random_id());
  const Record job(
      kJob,
      store_.set_if_absent(kJob, dump(json{{"version", kVersion},
                                           {"nnodes", self_.nnodes},
                                           {"max_restarts", self_.max_restarts},
                                           {"run_id", own_id},
                                           {"first_agent", me}})));
  job.number("version", kVersion, kVersion);
  job_nnodes_ = job.number("nnodes", 1, kMostNodes);
  const int max_restarts = job.number("max_restarts", 0, 1'000'000);
  run_id_ = job.text("run_id");
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
  refuse_if(job_nnodes_ != self_.nnodes, "--nnodes",
            std::to_string(self_.nnodes), std::to_string(job_nnodes_));
  refuse_if(max_restarts != self_.max_restarts, "--max-restarts",
            std::to_string(self_.max_restarts), std::to_string(max_restarts));
}

void NodeProtocol::claim_rank() {
  const std::string me = own_record();
  const auto place = [](const Record& node) {
    return node.text("host") + ", pid " +
           std::to_string(node.number("pid", 0, 1 << 30));
  };
  const std::string mine = self_.host + ", pid " + std::to_string(self_.pid);
  if (self_.node_rank) {
    const std::string where = key("node", *self_.node_rank);
    const std::string holder = store_.set_if_absent(where, me);
    if (holder != me && store_.check(key("departed", *self_.node_rank))) {
      throw JobClosed();  // an earlier launch of this node took the rank
    }
    if (holder != me) {
      refuse_rank("two agents have --node-rank=" +
                  std::to_string(*self_.node_rank) + ": the one on " +
                  place(Record(where, holder)) + " and the one on " + mine +
                  "; give each node its own rank, or with --rdzv-backend=c10d "
                  "none");
    }
    node_rank_ = *self_.node_rank;
    return;
  }
  // Looking at every rank from 0 on would cost each of many nodes a number of
  // requests that grows with them.
  const int guess = guess_free_rank();
  for (int look = -1; look < job_nnodes_; ++look) {
    const int rank = look < 0 ? guess : look;
    if (rank < job_nnodes_ &&
        store_.set_if_absent(key("node", rank), me) == me) {
      node_rank_ = rank;
      return;
    }
  }
  refuse_rank("the agent on " + mine + " is one too many: all " +
              std::to_string(job_nnodes_) +
              " nodes of this job are there; raise --nnodes, or name another "
              "endpoint");
}

// Returns the number of agents without a rank of their own that came before
// this one. An agent that joins again gets the same answer, so that it finds
// the rank that it has taken.
int NodeProtocol::guess_free_rank() {
  const std::string where = kPrefix + "arrival/" + self_.id;
  auto arrival = store_.get(where);
  if (!arrival) {
    arrival = dump(json{{"number", store_.add(kArrivals, 1) - 1}});
    store_.set(where, *arrival);
  }
  return Record(where, *arrival).number("number", 0, kMostArrivals);
}

void NodeProtocol::refuse(const std::string& reason) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::declined;
  verdict.exit_code = kUsageError;
  verdict.text = reason;
  // This ends round 0 only: the nodes of a later round have agreed already, and
  // wait for one that was lost.
  end_forming_round(0, verdict);
  throw JobRefused(reason);
}

void NodeProtocol::refuse_rank(const std::string& reason) {
  if (has_begun() && self_.max_restarts > 0) throw RankTaken(reason);
  refuse(reason);
}

// Ends the wait of nodes that would wait in vain. Does not disturb a job that
// runs.
void NodeProtocol::end_forming_round(int round, const Verdict& verdict) {
  if (store_.add(round_key(round, "offers"), 0) < job_nnodes_) {
    propose(round, verdict);
  }
}

void NodeProtocol::offer_round(int round, const RoundOffer& offer) {
  const std::string where = key("node", node_rank_);
  const std::string holder = store_.set_if_absent(where, own_record());
  if (holder != own_record()) {
    throw JobRefused("node " + std::to_string(node_rank_) + " (" + self_.host +
                     ") was given up as lost, and an agent on " +
                     Record(where, holder).text("host") + " has its rank");
  }
  if (!self_.connection.empty()) {
    store_.set(key("connection", node_rank_), self_.connection);
  }
  // Tells a replacement for a lost node which round to join.
  if (round > 0) store_.set(kRound, dump(json{{"number", round}}));
  round_ = round;
  offered_ = true;
  plan_given_ = false;
  question_given_ = false;
  verdict_given_ = false;
  store_.set(round_key(round, "node/" + std::to_string(node_rank_)),
             dump(json{{"nproc_per_node", self_.nproc_per_node},
                       {"role", self_.role},
                       {"master_addr", offer.master_addr},
                       {"master_port", offer.master_port}}));
  if (store_.add(round_key(round, "offers"), 1) >= self_.nnodes) propose_plan();
}

// The node that offers last writes one plan for all, so that the cost of a
// round grows with the number of nodes, and not with its square.
void NodeProtocol::propose_plan() {
  json plan{{"nodes", json::array()}};
  json& nodes = plan["nodes"];
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    // The node was lost after it had offered; another may take its place, and
    // then offers last.
    if (!store_.check(key("node", rank))) return;
    const std::string where = round_key(round_, "node/" + std::to_string(rank));
    const Record node(where, store_.get(where).value_or(""));
    const json run{
        {"count", 1},
        {"nproc_per_node", node.number("nproc_per_node", 1, kMostWorkers)},
        {"role", node.text("role")}};
    if (rank == 0) {
      plan["master_addr"] = node.text("master_addr");
      plan["master_port"] = node.number("master_port", 1, 65535);
    }
    if (!nodes.empty() && nodes.back()["role"] == run["role"] &&
        nodes.back()["nproc_per_node"] == run["nproc_per_node"]) {
      nodes.back()["count"] = nodes.back()["count"].get<int>() + 1;
    } else {
      nodes.push_back(run);
    }
  }
  store_.set_if_absent(round_key(round_, "plan"), dump(plan));
}

std::optional<RoundPlan> NodeProtocol::take_plan() {
  if (!offered_ || plan_given_) return std::nullopt;
  const std::string where = round_key(round_, "plan");
  const auto text = store_.get(where);
  if (!text) return std::nullopt;
  const Record record(where, *text);
  RoundPlan plan;
  plan.round = round_;
  NodePlace& place = plan.place;
  place = NodePlace::alone(0);
  place.node_rank = node_rank_;
  place.nnodes = self_.nnodes;
  plan.master_addr = record.text("master_addr");
  plan.master_port = record.number("master_port", 1, 65535);
  const std::string role = as_recorded(self_.role);
  int rank = 0;
  for (const Record& run : record.list("nodes")) {
    const int nodes = run.number("count", 1, self_.nnodes - rank);
    const int workers = run.number("nproc_per_node", 1, kMostWorkers);
    const bool same_role = run.text("role") == role;
    const int before = std::clamp(node_rank_ - rank, 0, nodes);
    place.first_rank += before * workers;
    if (same_role) place.first_role_rank += before * workers;
    place.world_size += nodes * workers;
    if (same_role) place.role_world_size += nodes * workers;
    rank += nodes;
  }
  if (rank != self_.nnodes) refuse_record(where);
  plan_given_ = true;
  // Notes the open connections now, before a node has a reason to die:
  // fate_of() recognises a closed connection only if it has seen it open.
  if (self_.hosts_store) look_for_lost_nodes();
  return plan;
}

std::vector<int> NodeProtocol::absent_nodes() {
  std::vector<int> absent;
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    if (!store_.check(key("node", rank)) ||
        !store_.check(round_key(round_, "node/" + std::to_string(rank)))) {
      absent.push_back(rank);
    }
  }
  return absent;
}

void NodeProtocol::report_success() {
  if (store_.add(round_key(round_, "succeeded"), 1) == self_.nnodes) {
    propose(round_, Verdict{});
  }
}

void NodeProtocol::ask_for_cause() {
  store_.add(round_key(round_, "questions"), 1);
}

bool NodeProtocol::take_question() {
  if (question_given_ || verdict_given_ || !plan_given_) return false;
  question_given_ = store_.add(round_key(round_, "questions"), 0) > 0;
  return question_given_;
}

void NodeProtocol::propose(int round, const Verdict& verdict) {
  store_.set_if_absent(round_key(round, "verdict"), dump(verdict));
}

std::optional<Verdict> NodeProtocol::take_verdict() {
  if (verdict_given_) return std::nullopt;
  if (plan_given_ &&
      store_.add(round_key(round_, "succeeded"), 0) == self_.nnodes) {
    // The success is also written as the verdict: a node that gets a signal now
    // must not end in another way.
    propose(round_, Verdict{});
  }
  const std::string where = round_key(round_, "verdict");
  const auto text = store_.get(where);
  if (!text) return std::nullopt;
  verdict_given_ = true;
  auto verdict = parse_verdict(where, *text);
  job_ended_ = verdict.ends_job(round_, self_.max_restarts);
  declined_ = verdict.kind == Verdict::Kind::declined;
  return verdict;
}

void NodeProtocol::await_news(std::chrono::milliseconds allowed, int wake_fd) {
  store_.await_change(
      {round_key(round_, "plan"), round_key(round_, "questions"),
       round_key(round_, "verdict")},
      allowed, wake_fd);
}

void NodeProtocol::beat(Clock::time_point now) {
  awake_.tick(now);
  if (now >= next_beat_ && node_rank_ >= 0) {
    next_beat_ = now + self_.keep_alive.interval;
    store_.set(key("beat", node_rank_), std::to_string(++beats_));
  }
  if (now >= next_look_ && self_.hosts_store) {
    next_look_ = now + kLookInterval;
    look_for_lost_nodes();
  }
}

void NodeProtocol::look_for_lost_nodes() {
  const auto accepted = accepted_ ? accepted_() : std::set<std::string>();
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    if (rank == node_rank_) continue;
    if (const auto fate = fate_of(rank, accepted)) give_up(rank, *fate);
  }
}

std::optional<std::string> NodeProtocol::fate_of(
    int node_rank, const std::set<std::string>& accepted) {
  const auto beat = store_.get(key("beat", node_rank));
  if (!beat || store_.check(key("departed", node_rank))) return std::nullopt;
  Heard& heard = heard_[node_rank];
  if (heard.beat != *beat) {
    heard.beat = *beat;
    heard.since = awake_.awake();
  }
  if (awake_.awake() - heard.since >= self_.keep_alive.allowance()) {
    return "its agent has shown no sign of life for " +
           seconds_text(self_.keep_alive.allowance());
  }
  const auto connection = store_.get(key("connection", node_rank));
  const bool connected = connection && accepted.count(*connection) > 0;
  // A connection that was never seen open has another name here, since a
  // gateway lies between.
  if (heard.connected && !connected) {
    return "its connection is closed";
  }
  heard.connected = connected;
  return std::nullopt;
}

void NodeProtocol::give_up(int node_rank, const std::string& fate) {
  std::string text = name_of(node_rank) + " was lost: " + fate;
  text += own_pause(awake_, self_.keep_alive, name_of(node_rank_));
  const bool takes_part =
      offered_ &&
      store_.check(round_key(round_, "node/" + std::to_string(node_rank)));
  vacate(node_rank);
  if (!takes_part) {
    notices_.push_back(text + "; another node may take its place");
  } else if (!verdict_given_) {
    Verdict verdict;
    verdict.kind = Verdict::Kind::failed;
    verdict.node_rank = node_rank;
    verdict.exit_code = kSystemError;
    verdict.text = text;
    propose(round_, verdict);
  }
}

void NodeProtocol::vacate(int node_rank) {
  heard_.erase(node_rank);
  store_.remove(key("beat", node_rank));
  store_.remove(key("connection", node_rank));
  // This key goes last: once it is gone, another agent may take the rank.
  store_.remove(key("node", node_rank));
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
    if (node_rank_ >= 0) store_.set(key("departed", node_rank_), "1");
  } else if (node_rank_ >= 0 &&
             store_.get(key("node", node_rank_)) == own_record()) {
    vacate(node_rank_);
  }
}

bool NodeProtocol::others_have_departed() {
  int departed = node_rank_ >= 0 && store_.check(key("departed", node_rank_));
  int joined = 0;
  for (int rank = 0; rank < job_nnodes_; ++rank) {
    if (rank == node_rank_) continue;
    if (store_.check(key("departed", rank))) {
      ++departed;
    } else if (store_.check(key("node", rank))) {
      ++joined;
    }
  }
  // A node that declined without joining has no rank and is not waited for.
  return joined == 0 && (!declined_ || departed >= job_nnodes_ - 1);
}

std::string NodeProtocol::name_of(int node_rank) {
  const std::string name = "node " + std::to_string(node_rank);
  const std::string where = key("node", node_rank);
  const auto node = store_.get(where);
  return node ? name + " (" + Record(where, *node).text("host") + ")" : name;
}

std::string NodeProtocol::name_of_store_host() {
  const auto rank = store_.get(kStoreHost);
  if (!rank || rank->empty() || rank->size() > 5 ||
      rank->find_first_not_of("0123456789") != std::string::npos) {
    return {};
  }
  return name_of(std::stoi(*rank));
}

}  // namespace lockstep::internal

#include "lockstep/launch/node_protocol.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

namespace lockstep {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr int kVersion = 1;
constexpr int kUsageError = 2;
constexpr int kSystemError = 1;
constexpr int kMostNodes = 65536;
constexpr int kMostWorkers = 4096;
constexpr size_t kLongestText = 4000;

const std::string kPrefix = "lockstep/";
const std::string kJob = kPrefix + "job";
const std::string kClosed = kPrefix + "closed";
const std::string kStoreHost = kPrefix + "store_host";

std::string key(const std::string& leaf, int node_rank) {
  return kPrefix + leaf + "/" + std::to_string(node_rank);
}

[[noreturn]] void refuse_record(const std::string& where) {
  throw ForeignRecord("the agents' store holds at " + where +
                      " what no agent of this version wrote; is the endpoint "
                      "another program's?");
}

// The store has no authentication, so that what it holds is checked.
class Record {
 public:
  Record(std::string where, const std::string& text)
      : where_(std::move(where)),
        json_(json::parse(text, nullptr, /*allow_exceptions=*/false)) {
    if (!json_.is_object()) refuse_record(where_);
  }

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

 private:
  std::string where_;
  json json_;
};

// Bytes that are no UTF-8 (a host's name may be anything) become "?" marks.
std::string dump(const json& record) {
  return record.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string dump(const Verdict& verdict) {
  return dump(json{{"kind", static_cast<int>(verdict.kind)},
                   {"node_rank", verdict.node_rank},
                   {"exit_code", verdict.exit_code},
                   {"signal", verdict.signal},
                   {"text", verdict.text}});
}

Verdict parse_verdict(const std::string& where, const std::string& text) {
  const Record record(where, text);
  Verdict verdict;
  verdict.kind = static_cast<Verdict::Kind>(
      record.number("kind", 0, static_cast<int>(Verdict::Kind::given_up)));
  verdict.node_rank = record.number("node_rank", -1, kMostNodes);
  verdict.exit_code = record.number("exit_code", 0, 255);
  verdict.signal = record.number("signal", 0, 64);
  verdict.text = record.text("text");
  return verdict;
}

// What Record::text() makes of a text of ours: so they can be compared.
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

std::string NodeProtocol::round_key(int round, const std::string& leaf) const {
  return kPrefix + "round/" + std::to_string(round) + "/" + leaf;
}

Membership NodeProtocol::join() {
  if (store_.check(kClosed)) throw JobClosed();
  agree_on_job();
  claim_rank();
  if (self_.hosts_store) store_.set(kStoreHost, std::to_string(node_rank_));
  beat(Clock::now());
  return {node_rank_, run_id_};
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
  const std::string me =
      dump(json{{"host", self_.host}, {"pid", self_.pid}, {"id", self_.id}});
  const auto place = [](const Record& node) {
    return node.text("host") + ", pid " +
           std::to_string(node.number("pid", 0, 1 << 30));
  };
  const std::string mine = self_.host + ", pid " + std::to_string(self_.pid);
  if (self_.node_rank) {
    const std::string where = key("node", *self_.node_rank);
    const std::string holder = store_.set_if_absent(where, me);
    if (holder != me) {
      refuse("two agents have --node-rank=" + std::to_string(*self_.node_rank) +
             ": the one on " + place(Record(where, holder)) +
             " and the one on " + mine +
             "; give each node its own rank, or with --rdzv-backend=c10d "
             "none");
    }
    node_rank_ = *self_.node_rank;
    return;
  }
  for (int rank = 0; rank < job_nnodes_; ++rank) {
    if (store_.set_if_absent(key("node", rank), me) == me) {
      node_rank_ = rank;
      return;
    }
  }
  refuse("the agent on " + mine + " is one too many: all " +
         std::to_string(job_nnodes_) +
         " nodes of this job are there; raise --nnodes, or name another "
         "endpoint");
}

void NodeProtocol::refuse(const std::string& reason) {
  // Those who wait would wait in vain. A job that runs is not disturbed.
  if (store_.add(round_key(0, "offers"), 0) < job_nnodes_) {
    Verdict verdict;
    verdict.kind = Verdict::Kind::given_up;
    verdict.exit_code = kUsageError;
    verdict.text = reason;
    propose(0, verdict);
  }
  throw JobRefused(reason);
}

void NodeProtocol::offer_round(int round, const RoundOffer& offer) {
  round_ = round;
  offered_ = true;
  plan_given_ = false;
  verdict_given_ = false;
  store_.set(round_key(round, "node/" + std::to_string(node_rank_)),
             dump(json{{"nproc_per_node", self_.nproc_per_node},
                       {"role", self_.role},
                       {"master_addr", offer.master_addr},
                       {"master_port", offer.master_port}}));
  store_.add(round_key(round, "offers"), 1);
}

std::optional<RoundPlan> NodeProtocol::take_plan() {
  if (!offered_ || plan_given_) return std::nullopt;
  if (store_.add(round_key(round_, "offers"), 0) < self_.nnodes) {
    return std::nullopt;
  }
  RoundPlan plan;
  plan.round = round_;
  NodePlace& place = plan.place;
  place = NodePlace::alone(0);
  place.node_rank = node_rank_;
  place.nnodes = self_.nnodes;
  const std::string role = as_recorded(self_.role);
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    const std::string where = round_key(round_, "node/" + std::to_string(rank));
    const Record node(where, store_.get(where).value_or(""));
    const int workers = node.number("nproc_per_node", 1, kMostWorkers);
    const bool same_role = node.text("role") == role;
    if (rank == 0) {
      plan.master_addr = node.text("master_addr");
      plan.master_port = node.number("master_port", 1, 65535);
    }
    if (rank < node_rank_) {
      place.first_rank += workers;
      if (same_role) place.first_role_rank += workers;
    }
    place.world_size += workers;
    if (same_role) place.role_world_size += workers;
  }
  plan_given_ = true;
  return plan;
}

std::vector<int> NodeProtocol::absent_nodes() {
  std::vector<int> absent;
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    if (!store_.check(round_key(round_, "node/" + std::to_string(rank)))) {
      absent.push_back(rank);
    }
  }
  return absent;
}

void NodeProtocol::report_success() {
  store_.add(round_key(round_, "succeeded"), 1);
}

void NodeProtocol::propose(int round, const Verdict& verdict) {
  store_.set_if_absent(round_key(round, "verdict"), dump(verdict));
}

std::optional<Verdict> NodeProtocol::take_verdict() {
  if (verdict_given_) return std::nullopt;
  if (plan_given_ &&
      store_.add(round_key(round_, "succeeded"), 0) == self_.nnodes) {
    // Written, too: a node that a signal reaches now must not end otherwise.
    propose(round_, Verdict{});
  }
  const std::string where = round_key(round_, "verdict");
  const auto text = store_.get(where);
  if (!text) return std::nullopt;
  verdict_given_ = true;
  return parse_verdict(where, *text);
}

void NodeProtocol::beat(Clock::time_point now) {
  if (now < next_beat_) return;
  next_beat_ = now + kBeatInterval;
  if (node_rank_ >= 0) {
    store_.set(key("beat", node_rank_), std::to_string(++beats_));
  }
  if (self_.hosts_store) look_for_lost_nodes(now);
}

void NodeProtocol::look_for_lost_nodes(Clock::time_point now) {
  for (int rank = 0; rank < self_.nnodes; ++rank) {
    if (rank == node_rank_) continue;
    const auto last = store_.get(key("beat", rank));
    if (!last || store_.check(key("departed", rank))) continue;
    Heard& heard = heard_[rank];
    if (heard.beat != *last) {
      heard = {*last, now};
      lost_.erase(rank);
    } else if (now - heard.since >= kBeatAllowance) {
      lost_.insert(rank);
    }
  }
  if (lost_.empty() || verdict_given_) return;
  Verdict verdict;
  verdict.kind = Verdict::Kind::given_up;
  verdict.node_rank = *lost_.begin();
  verdict.exit_code = kSystemError;
  verdict.text = name_of(verdict.node_rank) +
                 " was lost: its agent has not been heard of for " +
                 std::to_string(kBeatAllowance.count() / 1000) + " s";
  propose(round_, verdict);
}

void NodeProtocol::depart() {
  store_.set(kClosed, "1");
  if (node_rank_ >= 0) store_.set(key("departed", node_rank_), "1");
}

bool NodeProtocol::others_have_departed() {
  for (int rank = 0; rank < job_nnodes_; ++rank) {
    if (rank == node_rank_ || lost_.count(rank) > 0) continue;
    if (store_.check(key("node", rank)) &&
        !store_.check(key("departed", rank))) {
      return false;
    }
  }
  return true;
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

}  // namespace lockstep

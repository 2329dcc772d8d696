#include "lockstep/launch/nodes/node_records.h"

#include <utility>

#include "lockstep/base/shown_text.h"
#include "lockstep/launch/nodes/agent_store.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

constexpr size_t kLongestText = 4000;

}  // namespace

std::string node_key(const std::string& leaf, int node_rank) {
  return kStorePrefix + leaf + "/" + std::to_string(node_rank);
}

std::string round_key(int round, const std::string& leaf) {
  return kStorePrefix + "round/" + std::to_string(round) + "/" + leaf;
}

std::string loss_leaf(int node_rank) {
  return "lost/" + std::to_string(node_rank);
}

std::string given_up_leaf(int node_rank) {
  return "given_up/" + std::to_string(node_rank);
}

void refuse_record(const std::string& where) {
  throw ForeignRecord(
      "the agents' store holds a record at " + where +
      " that no agent of this version wrote; if another program "
      "uses this endpoint, name another one");
}

StoreRecord::StoreRecord(std::string where, const std::string& text)
    : StoreRecord(std::move(where),
                  json::parse(text, nullptr, /*allow_exceptions=*/false)) {}

StoreRecord::StoreRecord(std::string where, json record)
    : where_(std::move(where)), json_(std::move(record)) {
  if (!json_.is_object()) refuse_record(where_);
}

int StoreRecord::number(const char* name, int lowest, int highest) const {
  const auto found = json_.find(name);
  if (found == json_.end() || !found->is_number_integer()) {
    refuse_record(where_);
  }
  const auto value = found->get<int64_t>();
  if (value < lowest || value > highest) refuse_record(where_);
  return static_cast<int>(value);
}

std::string StoreRecord::text(const char* name) const {
  const auto found = json_.find(name);
  if (found == json_.end() || !found->is_string()) refuse_record(where_);
  return shown_line(found->get<std::string>().substr(0, kLongestText));
}

std::vector<StoreRecord> StoreRecord::list(const char* name) const {
  const auto found = json_.find(name);
  if (found == json_.end() || !found->is_array()) refuse_record(where_);
  std::vector<StoreRecord> records;
  for (const json& entry : *found)
    records.push_back(StoreRecord(where_, entry));
  return records;
}

std::string record_text(const json& record) {
  return record.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string verdict_text(const Verdict& verdict) {
  return record_text(
      json{{"kind", static_cast<int>(verdict.kind)},
           {"node_rank", verdict.node_rank},
           {"exit_code", verdict.exit_code},
           {"signal", verdict.signal},
           {"restarts", verdict.changes.restarts},
           {"membership_changes", verdict.changes.membership_changes},
           {"text", verdict.text.substr(0, kLongestText)}});
}

ChangeCount changes_in(const StoreRecord& record) {
  return {record.number("restarts", 0, kMostRounds),
          record.number("membership_changes", 0, kMostRounds)};
}

Verdict parse_verdict(const std::string& where, const std::string& text) {
  const StoreRecord record(where, text);
  Verdict verdict;
  verdict.kind = static_cast<Verdict::Kind>(
      record.number("kind", 0, static_cast<int>(Verdict::kLastKind)));
  verdict.node_rank = record.number("node_rank", -1, kMostNodes);
  verdict.exit_code = record.number("exit_code", 0, 255);
  verdict.signal = record.number("signal", 0, 64);
  verdict.text = record.text("text");
  verdict.changes = changes_in(record);
  return verdict;
}

NodeOffer parse_offer(int node_rank, const std::string& where,
                      const std::string& text) {
  const StoreRecord record(where, text);
  return {.candidate = {.node_rank = node_rank,
                        .last_place = record.number("place", -1, kMostNodes),
                        .last_round = record.number("placed", -1, kMostRounds)},
          .id = record.text("id"),
          .nproc_per_node = record.number("nproc_per_node", 1, kMostWorkers),
          .role = record.text("role"),
          .master_addr = record.text("master_addr"),
          .master_port = record.number("master_port", 0, 65535),
          .generation = record.number("generation", 0, kMostRounds)};
}

std::string plan_text(const std::vector<NodeOffer>& members) {
  json nodes = json::array();
  int next = -1;
  for (const NodeOffer& member : members) {
    const int node_rank = member.candidate.node_rank;
    if (node_rank == next && nodes.back()["role"] == member.role &&
        nodes.back()["nproc_per_node"] == member.nproc_per_node) {
      nodes.back()["count"] = nodes.back()["count"].get<int>() + 1;
    } else {
      nodes.push_back({{"first", node_rank},
                       {"count", 1},
                       {"nproc_per_node", member.nproc_per_node},
                       {"role", member.role}});
    }
    next = node_rank + 1;
  }
  return record_text(json{{"master_addr", members.front().master_addr},
                          {"master_port", members.front().master_port},
                          {"nodes", std::move(nodes)}});
}

std::string as_recorded(const std::string& text) {
  return StoreRecord("", record_text(json{{"text", text}})).text("text");
}

}  // namespace lockstep::internal

#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/launch/nodes/elastic_rules.h"
#include "lockstep/launch/nodes/round.h"

// The records of NodeProtocol, which the agents of a job write into their store
// and read from it as text. Every function that reads throws ForeignRecord
// (agent_store.h) if no agent of this version can have written what it reads.
namespace lockstep::internal {

inline constexpr int kMostNodes = 65536;
inline constexpr int kMostWorkers = 4096;
inline constexpr int kMostRounds = 1'000'000'000;

// The keys of the store begin so.
inline const std::string kStorePrefix = "lockstep/";
// How many spare nodes have come, and how many ranks were given up.
inline const std::string kSparesKey = kStorePrefix + "spares";
inline const std::string kVacanciesKey = kStorePrefix + "vacancies";

std::string node_key(const std::string& leaf, int node_rank);
std::string round_key(int round, const std::string& leaf);
// Where the host says that the round goes on without a node.
std::string loss_leaf(int node_rank);
// Whether a node of the round, or all its workers, were given up.
std::string given_up_leaf(int node_rank);

// Throws ForeignRecord. `where` is the key.
[[noreturn]] void refuse_record(const std::string& where);

// A record from the store. The store has no authentication, so every field is
// checked.
class StoreRecord {
 public:
  StoreRecord(std::string where, const std::string& text);

  int number(const char* name, int lowest, int highest) const;
  // Returns one line that can be shown.
  std::string text(const char* name) const;
  // Returns the records of an array.
  std::vector<StoreRecord> list(const char* name) const;

 private:
  StoreRecord(std::string where, nlohmann::json record);

  std::string where_;
  nlohmann::json json_;
};

// Bytes that are not UTF-8 (a host's name may be anything) become replacement
// characters.
std::string record_text(const nlohmann::json& record);
// Returns what StoreRecord::text() would read back for `text`, so that the two
// can be compared.
std::string as_recorded(const std::string& text);

std::string verdict_text(const Verdict& verdict);
Verdict parse_verdict(const std::string& where, const std::string& text);
ChangeCount changes_in(const StoreRecord& record);

// The offer of a node for a round.
struct NodeOffer {
  Candidate candidate{};
  std::string id{};  // of its agent
  int nproc_per_node = 1;
  std::string role{};
  std::string master_addr{};
  int master_port = 0;
  int generation = 0;  // the last one of its workers
};

NodeOffer parse_offer(int node_rank, const std::string& where,
                      const std::string& text);

// In the record of a round: nodes with the next higher ranks that are alike.
struct NodeRun {
  int nodes = 0;
  int workers = 0;  // of each
  std::string role{};
};

// Returns the record of a round with these nodes, in the order of their places.
std::string plan_text(const std::vector<NodeOffer>& members);

}  // namespace lockstep::internal

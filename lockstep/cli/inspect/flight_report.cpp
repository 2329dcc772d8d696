#include "lockstep/cli/inspect/flight_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "lockstep/cli/table.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

// At most this many rows are printed, as no user would read more. If there are
// more, the ranks that diverged come first.
constexpr size_t kMostRows = 32;

const char* name_of(FlightVerdict verdict) {
  switch (verdict) {
    case FlightVerdict::mismatch:
      return "mismatch";
    case FlightVerdict::absent:
      return "absent";
    case FlightVerdict::no_record:
      return "no record";
    case FlightVerdict::failed:
      return "failed";
    case FlightVerdict::waiting:
      return "waiting";
    default:
      return "consistent";
  }
}

std::string headline(const FlightGroupComparison& group) {
  const auto who = rank_list(group.blamed);
  const auto where = "#" + std::to_string(group.number);
  switch (group.verdict) {
    case FlightVerdict::mismatch:
      return who + " diverged at " + where;
    case FlightVerdict::absent:
      return who + " did not come to " + where;
    case FlightVerdict::no_record:
      return who + " left no record while others are at " + where;
    default:
      return "no divergence";
  }
}

std::vector<std::string> cells(const FlightRow& row, uint64_t number) {
  const auto rank = std::to_string(row.rank);
  if (row.file == nullptr) return {rank, "-", "(no record)", "", ""};
  if (row.entry == nullptr) return {rank, "-", "(did not come)", "", ""};
  const auto& entry = *row.entry;
  const auto to = entry.ended() ? entry.ended_ns : row.file->time_ns;
  return {
      rank, "#" + std::to_string(number), describe(entry), name_of(entry.state),
      (entry.ended() ? "after " : "for ") + duration(to - entry.created_ns)};
}

void print_rows(std::ostringstream& out, const FlightGroupComparison& group) {
  std::vector<FlightRow> rows = group.rows;
  std::ranges::stable_partition(rows, [&](const FlightRow& row) {
    return rows.size() > kMostRows &&
           std::ranges::count(group.blamed, row.rank) > 0;
  });
  std::vector<std::vector<std::string>> table{
      {"rank", "number", "call", "state", "time"}};
  for (size_t i = 0; i < std::min(rows.size(), kMostRows); ++i) {
    table.push_back(cells(rows[i], group.number));
  }
  out << table_text(table, {}, "  ");
  if (rows.size() > kMostRows) {
    out << "  and " << rows.size() - kMostRows << " more ranks\n";
  }
}

}  // namespace

std::string flight_table(const FlightComparison& comparison) {
  std::ostringstream out;
  if (!comparison.job.empty()) out << "job " << comparison.job << ", ";
  out << comparison.world_size
      << (comparison.world_size == 1 ? " rank" : " ranks");
  if (!comparison.missing.empty()) {
    out << "; no record of " << rank_list(comparison.missing);
  }
  out << '\n';
  for (const auto& group : comparison.groups) {
    out << "\ngroup " << group.name << " (" << rank_list(group.ranks)
        << "): " << headline(group) << '\n';
    for (const auto& finding : group.findings) out << "  " << finding << '\n';
    if (group.number != 0) print_rows(out, group);
    for (const auto& message : group.messages) {
      out << "  message, " << message << '\n';
    }
  }
  return out.str();
}

std::string flight_json(const FlightComparison& comparison) {
  json groups = json::array();
  for (const auto& group : comparison.groups) {
    json calls = json::array();
    for (const auto& row : group.rows) {
      json call{{"rank", row.rank}, {"record", row.file != nullptr}};
      if (row.entry != nullptr) {
        const auto& entry = *row.entry;
        call["call"] = describe(entry);
        call["state"] = name_of(entry.state);
        call["time_created_ns"] = entry.created_ns;
        call["time_ended_ns"] =
            entry.ended() ? json(entry.ended_ns) : json(nullptr);
      }
      calls.push_back(std::move(call));
    }
    groups.push_back({{"process_group", group.name},
                      {"ranks", group.ranks},
                      {"verdict", name_of(group.verdict)},
                      {"diverged", group.diverged()},
                      {"collective_seq_id",
                       group.number == 0 ? json(nullptr) : json(group.number)},
                      {"diverged_ranks", group.blamed},
                      {"findings", group.findings},
                      {"calls", std::move(calls)},
                      {"messages", group.messages}});
  }
  const json document{
      {"format", 1},
      {"job", comparison.job.empty() ? json(nullptr) : json(comparison.job)},
      {"world_size", comparison.world_size},
      {"records", comparison.recorded},
      {"missing", comparison.missing},
      {"diverged", comparison.diverged()},
      {"groups", std::move(groups)}};
  return document.dump(1) + "\n";
}

}  // namespace lockstep::internal

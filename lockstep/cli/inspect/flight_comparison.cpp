#include "lockstep/cli/inspect/flight_comparison.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "lockstep/cli/text.h"

namespace lockstep::internal {
namespace {

// Returns the number of elements that must be the same on all ranks of an
// operation; for gather(), whose output is on one rank only, that of the input.
// Returns nothing if the numbers may differ on every rank.
std::optional<uint64_t> common_elements(const FlightEntry& entry) {
  static const std::set<std::string> by_input{"gather", "reduce_scatter",
                                              "reduce_scatter_tensor"};
  static const std::set<std::string> by_output{"scatter", "all_gather",
                                               "all_gather_into_tensor",
                                               "all_gather_coalesced"};
  static const std::set<std::string> by_nothing{"all_to_all",
                                                "all_to_all_single"};
  if (by_input.contains(entry.operation)) return entry.in_elements;
  if (by_output.contains(entry.operation)) return entry.out_elements;
  if (by_nothing.contains(entry.operation)) return std::nullopt;
  // The operation has one tensor that is read, written or both.
  return std::max(entry.in_elements, entry.out_elements);
}

std::vector<std::string> differences(const FlightEntry& a,
                                     const FlightEntry& b) {
  std::vector<std::string> all;
  if (a.operation != b.operation) return {"operation"};
  if (a.dtype != b.dtype) all.push_back("dtype");
  if (a.reduce_op != b.reduce_op) all.push_back("reduce operation");
  if (common_elements(a) != common_elements(b)) all.push_back("elements");
  if (a.peer != b.peer) all.push_back("root");
  return all;
}

std::string numbered(uint64_t number) { return "#" + std::to_string(number); }

std::string age(const FlightFile& file, int64_t since) {
  return duration(file.time_ns - since);
}

// A rank's record of one group.
struct Member {
  int rank;
  const FlightFile* file = nullptr;
  const FlightFileGroup* group = nullptr;
  std::map<uint64_t, const FlightEntry*> calls{};

  const FlightEntry* at(uint64_t number) const {
    const auto found = calls.find(number);
    return found == calls.end() ? nullptr : found->second;
  }
  const FlightEntry* last() const {
    return group == nullptr ? nullptr : at(group->last_number);
  }
};

// Returns whether an operation still runs or has failed.
bool is_trouble(const FlightEntry& entry) {
  return entry.state != FlightState::completed;
}

class GroupComparer {
 public:
  GroupComparer(FlightGroupComparison& result, std::vector<Member> members)
      : result_(result), members_(std::move(members)) {
    for (const auto& member : members_) {
      for (const auto& [number, entry] : member.calls) {
        numbers_.insert(number);
        if (!is_trouble(*entry)) continue;
        auto& first = entry->state == FlightState::failed ? failed_ : waiting_;
        if (!first || number < *first) first = number;
        last_trouble_ = std::max(last_trouble_, number);
      }
    }
  }

  void run() {
    find_mismatch();
    find_absent();
    find_no_record();
    // Only if no rank has diverged: a rank may have diverged after an operation
    // that still runs, and the lower number would hide that.
    if (!result_.diverged()) {
      if (failed_) propose(FlightVerdict::failed, *failed_, {}, {});
      if (waiting_) propose(FlightVerdict::waiting, *waiting_, {}, {});
    }
    conclude();
    for (const auto& member : members_) {
      result_.rows.push_back({.rank = member.rank,
                              .file = member.file,
                              .entry = member.at(result_.number)});
      add_messages(member);
    }
  }

 private:
  // Keeps the verdict at the lowest number; at the same number, the one that
  // was proposed first, which is the graver one.
  void propose(FlightVerdict verdict, uint64_t number, std::vector<int> blamed,
               std::vector<std::string> findings) {
    const bool first = result_.number == 0;
    if (!first && number > result_.number) return;
    if (!first && number == result_.number) {
      // Other findings about this number come after the first ones.
      result_.findings.insert(result_.findings.end(), findings.begin(),
                              findings.end());
      return;
    }
    result_.verdict = verdict;
    result_.number = number;
    result_.blamed = std::move(blamed);
    result_.findings = std::move(findings);
  }

  void find_mismatch() {
    for (const uint64_t number : numbers_) {
      // Each side holds the ranks that made the same call.
      std::vector<std::vector<const Member*>> sides;
      for (const auto& member : members_) {
        const auto* entry = member.at(number);
        if (entry == nullptr) continue;
        auto side = std::ranges::find_if(sides, [&](const auto& one) {
          return differences(*one.front()->at(number), *entry).empty();
        });
        if (side == sides.end()) side = sides.emplace(sides.end());
        side->push_back(&member);
      }
      if (sides.size() < 2) continue;
      std::ranges::stable_sort(sides, std::greater(),
                               [](const auto& side) { return side.size(); });
      tell_mismatch(number, sides);
      return;
    }
  }

  void tell_mismatch(uint64_t number,
                     const std::vector<std::vector<const Member*>>& sides) {
    auto ranks = [](const std::vector<const Member*>& side) {
      std::vector<int> all;
      for (const auto* member : side) all.push_back(member->rank);
      return all;
    };
    const auto& most = sides.front();
    const bool tied = sides[1].size() == most.size();
    std::vector<int> blamed;
    std::vector<std::string> findings;
    const auto& expected = *most.front()->at(number);
    for (const auto& side : sides) {
      if (&side == &most && !tied) continue;
      const auto of_side = ranks(side);
      blamed.insert(blamed.end(), of_side.begin(), of_side.end());
      if (&side == &most) continue;
      const auto& entry = *side.front()->at(number);
      findings.push_back(rank_list(of_side) + " called " + describe(entry) +
                         " while " + rank_list(ranks(most)) + " called " +
                         describe(expected) + ": different " +
                         joined(differences(expected, entry), ", "));
    }
    std::ranges::sort(blamed);
    propose(FlightVerdict::mismatch, number, std::move(blamed),
            std::move(findings));
  }

  void find_absent() {
    std::map<uint64_t, std::pair<std::vector<int>, std::vector<std::string>>>
        by_number;
    for (const auto& member : members_) {
      if (member.file == nullptr || last_trouble_ == 0) continue;
      const auto* last = member.last();
      if (last != nullptr && !last->ended()) continue;  // it is inside
      const uint64_t next = member.group == nullptr
                                ? *numbers_.begin()
                                : member.group->last_number + 1;
      if (next > last_trouble_) continue;
      auto& [ranks, findings] = by_number[next];
      ranks.push_back(member.rank);
      findings.push_back(rank_list({member.rank}) +
                         " did not come: " + last_of(member, last));
    }
    if (by_number.empty()) return;
    auto& [number, found] = *by_number.begin();
    propose(FlightVerdict::absent, number, found.first, found.second);
  }

  std::string last_of(const Member& member, const FlightEntry* last) const {
    if (member.group == nullptr) {
      return "it has not made this group yet, or has destroyed it";
    }
    if (member.group->last_number == 0) return "it has called nothing yet";
    const auto number = numbered(member.group->last_number);
    if (last == nullptr) return "its last was " + number;
    std::string text =
        "its last was " + number + " " + describe(*last) + ", which " +
        (last->state == FlightState::failed ? "failed " : "completed ") +
        age(*member.file, last->ended_ns) + " before its record";
    if (is_older(*member.file, member.group->last_number + 1)) {
      text += ", which was written before others came here";
    }
    return text;
  }

  bool is_older(const FlightFile& file, uint64_t number) const {
    int64_t first = INT64_MAX;
    for (const auto& member : members_) {
      const auto* entry = member.at(number);
      if (entry != nullptr) first = std::min(first, entry->created_ns);
    }
    return first != INT64_MAX && file.time_ns < first;
  }

  void find_no_record() {
    std::vector<int> ranks;
    for (const auto& member : members_) {
      if (member.file == nullptr) ranks.push_back(member.rank);
    }
    const auto trouble =
        std::min(failed_.value_or(UINT64_MAX), waiting_.value_or(UINT64_MAX));
    if (ranks.empty() || trouble == UINT64_MAX) return;
    propose(FlightVerdict::no_record, trouble, ranks,
            {"no record of " + rank_list(ranks) +
             ": dead, or stuck outside of collectives; a process that lives "
             "writes its record after kill -USR1"});
  }

  void conclude() {
    std::vector<int> inside;
    std::vector<int> failed;
    std::vector<int> waiting;
    const FlightEntry* call = nullptr;
    for (const auto& member : members_) {
      const auto* entry = member.at(result_.number);
      if (entry == nullptr) continue;
      call = entry;
      inside.push_back(member.rank);
      if (entry->state == FlightState::failed) {
        failed.push_back(member.rank);
      } else if (!entry->ended()) {
        waiting.push_back(member.rank);
      }
    }
    auto& findings = result_.findings;
    if (result_.number == 0) {
      findings.push_back(numbers_.empty()
                             ? "no collective was called"
                             : "no divergence from " +
                                   numbered(*numbers_.begin()) + " to " +
                                   numbered(*numbers_.rbegin()));
    } else if (!result_.diverged()) {
      findings.push_back("no divergence: " + rank_list(inside) + " called " +
                         describe(*call));
    }
    if (!failed.empty())
      findings.push_back("it failed on " + rank_list(failed));
    if (!waiting.empty()) {
      findings.push_back(rank_list(waiting) + (waiting.size() > 1
                                                   ? " are inside and wait"
                                                   : " is inside and waits"));
    }
  }

  void add_messages(const Member& member) {
    if (member.group == nullptr) return;
    for (const auto& entry : member.group->entries) {
      if (entry.number != 0 || !is_trouble(entry)) continue;
      result_.messages.push_back(
          rank_list({member.rank}) + ": " + describe(entry) +
          (entry.ended()
               ? ", failed after " + duration(entry.ended_ns - entry.created_ns)
               : ", for " + age(*member.file, entry.created_ns)));
    }
  }

  FlightGroupComparison& result_;
  const std::vector<Member> members_;
  std::set<uint64_t> numbers_{};
  std::optional<uint64_t> failed_{};   // the lowest
  std::optional<uint64_t> waiting_{};  // the lowest
  uint64_t last_trouble_ = 0;
};

std::vector<Member> members_of(const FlightGroupComparison& group,
                               const std::vector<FlightFile>& files) {
  std::vector<Member> members;
  for (const int rank : group.ranks) {
    Member member{.rank = rank};
    for (const auto& file : files) {
      if (file.rank != rank) continue;
      member.file = &file;
      for (const auto& one : file.groups) {
        if (one.name == group.name && one.ranks == group.ranks) {
          member.group = &one;
        }
      }
    }
    if (member.group != nullptr) {
      for (const auto& entry : member.group->entries) {
        if (entry.number > 0) member.calls.emplace(entry.number, &entry);
      }
    }
    members.push_back(std::move(member));
  }
  return members;
}

}  // namespace

bool FlightComparison::diverged() const {
  return std::ranges::any_of(groups, &FlightGroupComparison::diverged);
}

FlightComparison compare_flights(const std::vector<FlightFile>& files) {
  FlightComparison comparison;
  comparison.world_size = files.front().world_size;
  std::set<int> recorded;
  std::set<std::pair<std::string, std::vector<int>>> known;
  for (const auto& file : files) {
    if (!file.job.empty()) comparison.job = file.job;
    recorded.insert(file.rank);
    for (const auto& group : file.groups) {
      if (!known.emplace(group.name, group.ranks).second) continue;
      comparison.groups.push_back({.name = group.name, .ranks = group.ranks});
    }
  }
  comparison.recorded.assign(recorded.begin(), recorded.end());
  for (int rank = 0; rank < comparison.world_size; ++rank) {
    if (!recorded.contains(rank)) comparison.missing.push_back(rank);
  }
  for (auto& group : comparison.groups) {
    GroupComparer(group, members_of(group, files)).run();
  }
  return comparison;
}

std::string describe(const FlightEntry& entry) {
  std::string text = entry.operation;
  if (!entry.reduce_op.empty()) text += " " + entry.reduce_op;
  if (!entry.dtype.empty()) {
    const auto in = std::to_string(entry.in_elements);
    const auto out = std::to_string(entry.out_elements);
    text += " " + entry.dtype + "[" +
            (entry.in_elements == 0 || in == out ? out
             : entry.out_elements == 0           ? in
                                                 : in + " -> " + out) +
            "]";
  }
  const bool receives = entry.operation == "recv" || entry.operation == "irecv";
  if (entry.peer >= 0) {
    text += (entry.number > 0 ? " root "
             : receives       ? " from rank "
                              : " to rank ") +
            std::to_string(entry.peer);
  } else if (receives) {
    text += " from any rank";
  }
  return text;
}

std::string rank_list(const std::vector<int>& sorted) {
  std::string text = sorted.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < sorted.size();) {
    size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    // Two ranks are not written as a range.
    if (end - i == 2) end = i + 1;
    if (i > 0) text += ", ";
    text += std::to_string(sorted[i]);
    if (end - i > 1) text += "-" + std::to_string(sorted[end - 1]);
    i = end;
  }
  return text;
}

std::string duration(int64_t nanoseconds) {
  const double seconds = static_cast<double>(nanoseconds) * 1e-9;
  char text[48];
  if (seconds < 0.1) {
    std::snprintf(text, sizeof(text), "%.3f ms", seconds * 1e3);
  } else if (seconds < 600) {
    std::snprintf(text, sizeof(text), "%.2f s", seconds);
  } else {
    std::snprintf(text, sizeof(text), "%.0f min", seconds / 60);
  }
  return text;
}

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

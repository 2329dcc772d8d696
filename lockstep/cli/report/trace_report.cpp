#include "lockstep/cli/report/trace_report.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "lockstep/cli/inspect/flight_comparison.h"
#include "lockstep/cli/text.h"

namespace lockstep::internal {
namespace {

struct RankStep {
  int rank;
  Interval time;
};

// The ranks of a job make a step at nearly the same time, because they wait for
// each other in it. If two ranks did not, their clocks differ. The last step of
// a trace does not count, because it may end before the rank has waited.
void find_steps_apart(const std::vector<TraceFile>& files,
                      ClockAlignment& clocks) {
  std::map<int64_t, RankStep> earliest;  // by number: the one that ends first
  std::map<int64_t, RankStep> latest;    // the one that begins last
  for (const TraceFile& file : files) {
    for (const auto& [number, time] : file.steps) {
      if (file.steps.size() > 1 && number == file.steps.rbegin()->first) {
        continue;
      }
      const RankStep step{file.header.rank, time};
      auto& early = earliest.emplace(number, step).first->second;
      if (time.end < early.time.end) early = step;
      auto& late = latest.emplace(number, step).first->second;
      if (time.begin > late.time.begin) late = step;
    }
  }
  for (const auto& [number, early] : earliest) {
    const RankStep& late = latest.at(number);
    if (number < 0 || late.rank == early.rank ||
        late.time.begin < early.time.end) {
      continue;
    }
    clocks.warnings.push_back(
        "step " + std::to_string(number) + " of rank " +
        std::to_string(late.rank) + " begins " +
        duration(late.time.begin - early.time.end) + " after that of rank " +
        std::to_string(early.rank) +
        " has ended: the clocks differ, and times of different ranks cannot be "
        "compared");
    return;  // one step says it all
  }
}

}  // namespace

ClockAlignment compare_clocks(const std::vector<TraceFile>& files) {
  ClockAlignment clocks;
  std::set<std::string> hosts;
  std::set<int> unmeasured;
  for (const TraceFile& file : files) {
    if (!file.header.host.empty()) hosts.insert(file.header.host);
    // A profiler that compares no clocks writes zeros. All others' clocks are
    // compared with that of rank 0.
    const TraceHeader& header = file.header;
    const bool compared =
        header.clock_offset_ns != 0 || header.clock_uncertainty_ns != 0;
    if (!header.clock_measured || (header.rank != 0 && !compared)) {
      unmeasured.insert(header.rank);
    }
    clocks.uncertainty_ns =
        std::max(clocks.uncertainty_ns, file.header.clock_uncertainty_ns);
  }
  clocks.measured = unmeasured.empty();
  if (!clocks.measured && hosts.size() > 1) {
    clocks.warnings.push_back(
        "the clock of " + rank_list({unmeasured.begin(), unmeasured.end()}) +
        " was not compared with the others' (no lockstep.clock_offset_ns)");
  }
  find_steps_apart(files, clocks);
  return clocks;
}

namespace {

// Returns the time of each activity of a thread without those inside it.
std::vector<int64_t> self_times(const std::vector<TraceActivity>& all) {
  std::vector<int64_t> self;
  std::vector<size_t> open;  // the last one is innermost
  for (size_t i = 0; i < all.size(); ++i) {
    self.push_back(all[i].time.length());
    // It ends when the work does, whatever its thread does meanwhile.
    if (all[i].activity == Activity::communication_in_flight) continue;
    while (!open.empty() && all[open.back()].time.end <= all[i].time.begin) {
      open.pop_back();
    }
    if (!open.empty()) {
      const int64_t end = std::min(all[i].time.end, all[open.back()].time.end);
      self[open.back()] -= end - all[i].time.begin;
    }
    open.push_back(i);
  }
  return self;
}

bool is_operator(Activity activity) {
  return activity == Activity::compute || activity == Activity::operators;
}

}  // namespace

void add_operator_times(const TraceFile& file,
                        std::map<std::string, OperatorTime>& times) {
  const bool has_device = file.has_device();
  std::vector<Interval> steps;
  for (const auto& [number, time] : file.steps) steps.push_back(time);
  std::ranges::sort(steps, {}, &Interval::begin);
  for (const TraceThread& thread : file.threads) {
    if (has_device && !thread.on_device) continue;
    const auto self = self_times(thread.activities);
    for (size_t i = 0; i < self.size(); ++i) {
      const TraceActivity& each = thread.activities[i];
      if (!is_operator(each.activity)) continue;
      // The last step that begins before it.
      const auto step = std::ranges::upper_bound(steps, each.time.begin, {},
                                                 &Interval::begin);
      if (step == steps.begin() || each.time.begin >= std::prev(step)->end) {
        continue;
      }
      OperatorTime& time = times[file.names[each.name]];
      ++time.calls;
      time.self_ns += self[i];
    }
  }
}

std::vector<OperatorTime> by_time(std::map<std::string, OperatorTime> times) {
  std::vector<OperatorTime> sorted;
  for (auto& [name, time] : times) {
    sorted.push_back(std::move(time));
    sorted.back().name = name;
  }
  std::ranges::stable_sort(sorted, std::ranges::greater(),
                           &OperatorTime::self_ns);
  return sorted;
}

namespace {

using nlohmann::json;

// At most this many ranks are printed, as no user would read more. If there are
// more, the stragglers come first.
constexpr size_t kMostShownRanks = 64;
constexpr size_t kMostStragglers = 4;
constexpr size_t kMostOperators = 10;
constexpr size_t kLongestName =
    60;  // of a kernel, which may be a whole template

struct MeasuredRank {
  RankReport report{};
  std::map<int64_t, StepTime> steps{};
};

MeasuredRank measure(const TraceFolder& folder, int rank) {
  MeasuredRank measured;
  measured.report.rank = rank;
  std::vector<int64_t> lengths;
  for (const TraceFile& file : folder.files) {
    if (file.header.rank != rank) continue;
    if (!file.header.host.empty()) measured.report.host = file.header.host;
    const RankActivity activity = rank_activity(file.threads);
    for (const auto& [number, window] : file.steps) {
      const StepTime time = step_time(activity, window);
      measured.steps.emplace(number, time);
      measured.report.time += time;
      measured.report.flops += flops_within(file.threads, window);
      lengths.push_back(time.total());
    }
  }
  measured.report.steps = lengths.size();
  if (!lengths.empty()) {
    measured.report.step_ns =
        measured.report.time.total() / static_cast<int64_t>(lengths.size());
  }
  measured.report.median_step_ns = median(std::move(lengths));
  return measured;
}

// Returns the times of the steps that all ranks have.
std::vector<RankSteps> common_steps(const std::vector<MeasuredRank>& ranks) {
  std::vector<RankSteps> common;
  for (const MeasuredRank& rank : ranks) {
    common.push_back({rank.report.rank, {}});
  }
  for (const auto& [number, unused] : ranks.front().steps) {
    if (!std::ranges::all_of(ranks, [&](const MeasuredRank& rank) {
          return rank.steps.contains(number);
        })) {
      continue;
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      common[i].steps.push_back(ranks[i].steps.at(number));
    }
  }
  return common;
}

double share(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

std::string percent(double part) { return format("%.1f %%", 100 * part); }

std::string time_text(int64_t nanoseconds) {
  const auto time = static_cast<double>(nanoseconds);
  if (nanoseconds < 1'000'000) return format("%.1f us", time * 1e-3);
  if (nanoseconds < 1'000'000'000) return format("%.2f ms", time * 1e-6);
  return format("%.2f s", time * 1e-9);
}

std::string flops_text(double flops_per_second) {
  constexpr std::array kUnits{"", "k", "M", "G", "T", "P"};
  size_t unit = 0;
  while (flops_per_second >= 1000 && unit + 1 < kUnits.size()) {
    flops_per_second /= 1000;
    ++unit;
  }
  return format("%.3g %sFLOP/s", flops_per_second, kUnits[unit]);
}

double rank_flops_per_second(const RankReport& rank) {
  const auto seconds = static_cast<double>(rank.time.total()) * 1e-9;
  return seconds > 0 ? rank.flops / seconds : 0;
}

double rank_goodput(const RankReport& rank) {
  return share(rank.time.compute + rank.time.optimizer, rank.time.total());
}

std::vector<std::string> row_of(const RankReport& rank, bool hosts) {
  const StepTime& time = rank.time;
  std::vector<std::string> row{std::to_string(rank.rank)};
  if (hosts) row.push_back(rank.host.empty() ? "?" : rank.host);
  row.push_back(std::to_string(rank.steps));
  row.push_back(time_text(rank.step_ns));
  for (const int64_t part :
       {time.compute, time.optimizer, time.exposed, time.loader, time.snapshot,
        time.idle, time.overlapped}) {
    row.push_back(percent(share(part, time.total())));
  }
  return row;
}

std::string clocks_line(const TraceReport& report) {
  if (report.clocks.measured) {
    return "measured offsets, wrong by at most " +
           time_text(report.clocks.uncertainty_ns);
  }
  const auto& ranks = report.ranks;
  const bool one_host = !ranks[0].host.empty() &&
                        std::ranges::all_of(ranks, [&](const RankReport& rank) {
                          return rank.host == ranks[0].host;
                        });
  return one_host ? "that of one host"
                  : "not compared; right if all ranks ran on one host";
}

std::string straggler_line(const Straggler& one) {
  return "straggler: rank " + std::to_string(one.rank) + " takes " +
         time_text(one.own_ns) + " of its own for a step, the others " +
         time_text(one.others_ns) + "; " + one.reason + " is " +
         time_text(one.reason_ns) + " longer\n";
}

// "; from step to step the difference varies by 1.2 ms".
std::string spread_text(const Straggler& one, size_t steps) {
  if (steps < 2) return "";
  return "; from step to step the difference varies by " +
         time_text(one.spread_ns);
}

std::string balance_lines(const Balance& balance) {
  std::string text;
  const auto& all = balance.stragglers;
  for (size_t i = 0; i < std::min(all.size(), kMostStragglers); ++i) {
    text += straggler_line(all[i]);
  }
  if (all.size() > kMostStragglers) {
    text += "  and " + std::to_string(all.size() - kMostStragglers) +
            " more stragglers\n";
  }
  if (all.empty()) {
    text += "straggler: none";
  } else {
    text += "without " + std::string(all.size() == 1 ? "it" : "them") +
            " a step would be " + time_text(balance.lost_ns) + " shorter";
    if (all.size() == 1) text += spread_text(all[0], balance.steps);
  }
  text += "; the ranks' own times differ by " + percent(balance.spread) + "\n";
  if (!balance.doubtful.empty()) {
    const Straggler& one = balance.doubtful.front();
    text += "noise: rank " + std::to_string(one.rank) + " takes " +
            time_text(one.own_ns - one.others_ns) + " more than the others" +
            spread_text(one, balance.steps) + "; record more steps to tell\n";
  }
  return text;
}

// Returns the operators that take longest, in the mean of a step of a rank; or
// nothing if the traces have none.
std::string operator_table(const TraceReport& report) {
  int64_t steps = 0;
  int64_t whole = 0;
  for (const RankReport& rank : report.ranks) {
    steps += static_cast<int64_t>(rank.steps);
    whole += rank.time.total();
  }
  if (report.operators.empty() || steps == 0) return "";
  std::vector<std::vector<std::string>> rows{
      {"operator, by itself", "calls", "time", "of a step"}};
  for (const OperatorTime& each : report.operators) {
    if (rows.size() > kMostOperators) break;
    std::string name = each.name;
    if (name.size() > kLongestName) {
      name = name.substr(0, kLongestName - 3) + "...";
    }
    rows.push_back({std::move(name),
                    format("%.1f", static_cast<double>(each.calls) /
                                       static_cast<double>(steps)),
                    time_text(each.self_ns / steps),
                    percent(share(each.self_ns, whole))});
  }
  return "\n" + table_text(rows, {1, 2, 3});
}

json stragglers_json(const std::vector<Straggler>& stragglers) {
  json list = json::array();
  for (const Straggler& one : stragglers) {
    list.push_back({{"rank", one.rank},
                    {"own_ns", one.own_ns},
                    {"others_ns", one.others_ns},
                    {"spread_ns", one.spread_ns},
                    {"reason", one.reason},
                    {"reason_ns", one.reason_ns},
                    {"slower_steps", one.slower_steps}});
  }
  return list;
}

std::vector<RankReport> shown_ranks(const TraceReport& report) {
  std::vector<RankReport> ranks = report.ranks;
  if (ranks.size() <= kMostShownRanks) return ranks;
  std::ranges::stable_partition(ranks, [&](const RankReport& rank) {
    return std::ranges::any_of(
        report.balance.stragglers,
        [&](const Straggler& one) { return one.rank == rank.rank; });
  });
  ranks.resize(kMostShownRanks);
  return ranks;
}

}  // namespace

double TraceReport::goodput() const {
  int64_t computed = 0;
  int64_t whole = 0;
  for (const RankReport& rank : ranks) {
    computed += rank.time.compute + rank.time.optimizer;
    whole += rank.time.total();
  }
  return share(computed, whole);
}

double TraceReport::flops_per_second() const {
  double sum = 0;
  for (const RankReport& rank : ranks) sum += rank_flops_per_second(rank);
  return sum;
}

TraceReport make_trace_report(const TraceFolder& folder) {
  TraceReport report;
  report.folder = folder.path;
  report.world_size = folder.world_size;
  report.missing = folder.missing;
  report.warnings = folder.warnings;
  report.clocks = compare_clocks(folder.files);
  if (!folder.missing.empty()) {
    report.warnings.push_back("no trace of " + rank_list(folder.missing) +
                              " of " + std::to_string(folder.world_size) +
                              " ranks");
  }
  report.warnings.insert(report.warnings.end(), report.clocks.warnings.begin(),
                         report.clocks.warnings.end());
  std::vector<MeasuredRank> ranks;
  for (const int rank : folder.ranks) {
    ranks.push_back(measure(folder, rank));
    report.ranks.push_back(ranks.back().report);
  }
  std::map<std::string, OperatorTime> operators;
  for (const TraceFile& file : folder.files) {
    add_operator_times(file, operators);
    report.uncounted_convolutions += file.uncounted_convolutions;
  }
  report.operators = by_time(std::move(operators));
  report.whole_traces = std::ranges::all_of(
      folder.files,
      [](const TraceFile& file) { return file.steps.begin()->first < 0; });
  report.balance = compare_ranks(common_steps(ranks));
  if (ranks.size() > 1 && report.balance.steps == 0) {
    report.warnings.push_back(
        "the ranks have no step in common, so they are not compared");
  }
  return report;
}

std::string trace_table(const TraceReport& report) {
  std::ostringstream out;
  const bool hosts = std::ranges::any_of(
      report.ranks, [](const RankReport& rank) { return !rank.host.empty(); });
  std::vector<std::vector<std::string>> table{{"rank"}};
  if (hosts) table[0].push_back("host");
  for (const char* title : {"steps", "step", "compute", "optimizer", "exposed",
                            "loader", "snapshot", "idle", "overlapped"}) {
    table[0].emplace_back(title);
  }
  const auto shown = shown_ranks(report);
  for (const RankReport& rank : shown) table.push_back(row_of(rank, hosts));
  std::vector<size_t> right;
  for (size_t i = hosts ? 2 : 1; i < table[0].size(); ++i) right.push_back(i);
  out << table_text(table, right);
  if (shown.size() < report.ranks.size()) {
    out << "and " << report.ranks.size() - shown.size() << " more ranks\n";
  }
  out << '\n';
  if (report.balance.steps > 0) out << balance_lines(report.balance);
  out << "goodput: " << percent(report.goodput()) << '\n';
  if (const double flops = report.flops_per_second(); flops > 0) {
    out << "model: " << flops_text(flops) << ", "
        << flops_text(flops / static_cast<double>(report.ranks.size()))
        << " a rank";
    if (report.uncounted_convolutions > 0) {
      out << ", without the convolutions: record their sizes (record_shapes)";
    }
    out << '\n';
  } else if (report.uncounted_convolutions > 0) {
    out << "model: no operations are counted: record their sizes "
           "(record_shapes)\n";
  }
  if (report.ranks.size() > 1) out << "clocks: " << clocks_line(report) << '\n';
  out << operator_table(report);
  return out.str();
}

std::string trace_json(const TraceReport& report) {
  json ranks = json::array();
  for (const RankReport& rank : report.ranks) {
    const StepTime& time = rank.time;
    json shares = json::object();
    for (const auto& [name, part] : {std::pair{"compute", time.compute},
                                     {"optimizer", time.optimizer},
                                     {"exposed", time.exposed},
                                     {"loader", time.loader},
                                     {"snapshot", time.snapshot},
                                     {"idle", time.idle},
                                     {"overlapped", time.overlapped}}) {
      shares[name] = share(part, time.total());
    }
    ranks.push_back(
        {{"rank", rank.rank},
         {"host", rank.host.empty() ? json(nullptr) : json(rank.host)},
         {"steps", rank.steps},
         {"step_ns", rank.step_ns},
         {"median_step_ns", rank.median_step_ns},
         {"total_ns", time.total()},
         {"shares", std::move(shares)},
         {"goodput", rank_goodput(rank)},
         {"flops_per_second",
          rank.flops > 0 ? json(rank_flops_per_second(rank)) : json(nullptr)}});
  }
  json operators = json::array();
  for (const OperatorTime& each : report.operators) {
    operators.push_back({{"name", each.name},
                         {"calls", each.calls},
                         {"self_ns", each.self_ns}});
  }
  const double flops = report.flops_per_second();
  const json document{
      {"format", 1},
      {"folder", report.folder},
      {"world_size", report.world_size},
      {"missing", report.missing},
      {"whole_traces", report.whole_traces},
      {"ranks", std::move(ranks)},
      {"compared_steps", report.balance.steps},
      {"stragglers", stragglers_json(report.balance.stragglers)},
      {"doubtful", stragglers_json(report.balance.doubtful)},
      {"operators", std::move(operators)},
      {"uncounted_convolutions", report.uncounted_convolutions},
      {"lost_ns", report.balance.lost_ns},
      {"spread", report.balance.spread},
      {"goodput", report.goodput()},
      {"flops_per_second", flops > 0 ? json(flops) : json(nullptr)},
      {"clocks",
       {{"measured", report.clocks.measured},
        {"uncertainty_ns", report.clocks.measured
                               ? json(report.clocks.uncertainty_ns)
                               : json(nullptr)}}},
      {"warnings", report.warnings}};
  return document.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep::internal

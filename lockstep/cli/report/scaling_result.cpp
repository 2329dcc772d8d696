#include "lockstep/cli/report/scaling_result.h"

#include <algorithm>
#include <cstdint>

#include "lockstep/cli/format.h"
#include "lockstep/cli/table.h"

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;

constexpr int kFormat = 1;  // of the JSON

double median_of_rounds(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle]
                                : (values[middle - 1] + values[middle]) / 2;
}

ScalingRow row_of(const ScalingCase& which,
                  const std::vector<ScalingMeasurement>& rounds) {
  std::vector<double> rates;
  std::vector<double> seconds;
  std::vector<double> targets;
  for (const auto& round : rounds) {
    rates.push_back(round.samples_per_s);
    seconds.push_back(round.seconds);
    if (round.target_s) targets.push_back(*round.target_s);
  }
  const double rate = median_of_rounds(rates);
  return {.which = which,
          .samples_per_s = rate,
          .least_samples_per_s = std::ranges::min(rates),
          .most_samples_per_s = std::ranges::max(rates),
          .seconds = median_of_rounds(seconds),
          .target_s = targets.size() == rounds.size()
                          ? std::optional(median_of_rounds(targets))
                          : std::nullopt,
          .speed_up = 0,
          .efficiency = 0,
          .core_seconds = 1000 * which.nproc / rate};
}

// A number with about three digits, without an exponent.
std::string number(double value) {
  return format(value >= 100 ? "%.0f" : value >= 10 ? "%.1f" : "%.2f", value);
}

}  // namespace

std::vector<ScalingTable> make_tables(
    const std::vector<ScalingCase>& cases,
    const std::vector<std::vector<ScalingMeasurement>>& measured) {
  std::vector<ScalingRow> rows;
  for (size_t i = 0; i < cases.size(); ++i) {
    rows.push_back(row_of(cases[i], measured[i]));
    rows.back().speed_up =
        rows.back().samples_per_s / rows.front().samples_per_s;
    rows.back().efficiency = rows.back().speed_up / cases[i].nproc;
  }
  std::vector<ScalingTable> tables{{.scaling = Scaling::weak, .rows = {}}};
  for (const auto& row : rows) {
    if (row.which.scaling != tables.back().scaling) {
      // One process scales in neither way.
      tables.push_back({.scaling = row.which.scaling, .rows = {}});
      for (const auto& common : rows) {
        if (common.which.nproc == 1) tables.back().rows.push_back(common);
      }
    }
    tables.back().rows.push_back(row);
  }
  for (auto& table : tables) {
    std::ranges::stable_sort(table.rows, {}, [](const ScalingRow& row) {
      return std::pair(row.which.side, row.which.nproc);
    });
  }
  return tables;
}

std::string title_of(Scaling scaling) {
  return scaling == Scaling::weak
             ? "Weak scaling: each process has as many samples in a step as "
               "one "
               "process alone"
             : "Strong scaling: all processes together have as many samples in "
               "a step as one process alone";
}

std::vector<std::vector<std::string>> cells_of(const ScalingTable& table,
                                               const std::string& target) {
  std::vector<std::vector<std::string>> rows{{"", "samples/s", "least", "most",
                                              "speed-up", "efficiency",
                                              "core-seconds per 1000"}};
  if (!target.empty()) rows.front().push_back("seconds to " + target);
  for (const auto& row : table.rows) {
    rows.push_back(
        {row.which.label(), number(row.samples_per_s),
         number(row.least_samples_per_s), number(row.most_samples_per_s),
         format("%.2f", row.speed_up), format("%.0f %%", 100 * row.efficiency),
         number(row.core_seconds)});
    if (!target.empty()) {
      rows.back().push_back(row.target_s ? number(*row.target_s) : "not met");
    }
  }
  return rows;
}

std::string result_text(const std::vector<ScalingTable>& tables) {
  std::string text;
  bool threads_win = false;
  for (const auto& table : tables) {
    const ScalingRow* ranks = nullptr;
    for (const auto& row : table.rows) {
      if (row.which.side == ScalingSide::ranks) ranks = &row;
    }
    const int nproc = ranks->which.nproc;
    if (nproc == 1) {
      return "Only one process was measured, with " +
             number(ranks->samples_per_s) + " samples/s.";
    }
    text += (text.empty() ? "" : " ") + ranks->which.label() + " train ";
    std::vector<std::string> parts{
        format("%.2f times as fast as one (%.0f %% of ideal)", ranks->speed_up,
               100 * ranks->efficiency)};
    for (const auto& row : table.rows) {
      if (row.which.nproc != nproc || row.which.side == ScalingSide::ranks) {
        continue;
      }
      threads_win |= row.which.side == ScalingSide::threads &&
                     row.samples_per_s > ranks->samples_per_s;
      parts.push_back(format("%.2f times as fast as ",
                             ranks->samples_per_s / row.samples_per_s) +
                      (row.which.side == ScalingSide::compared
                           ? "the compared command"
                           : format("one process with %d threads", nproc)));
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      text += (i == 0                  ? ""
               : i + 1 == parts.size() ? ", and "
                                       : ", ") +
              parts[i];
    }
    text += table.scaling == Scaling::weak
                ? "."
                : ", if they divide the batch of one process.";
  }
  if (threads_win) {
    text +=
        " Threads are faster here. Change the line of the optimizer first: "
        "from "
        "torch::optim to lockstep::optim, and then to a "
        "ZeroRedundancyOptimizer "
        "with shared_parameters; more samples in a step help next.";
  }
  return text;
}

std::string load_warning(const ordered_json& machine) {
  const double load = machine.at("load_before");
  const int cores = machine.at("cores");
  if (load < 0.2 * cores) return "";
  return format(
      "The machine was busy before the runs (a load of %.2f on %d "
      "cores), so the figures may be too low.",
      load, cores);
}

std::string scaling_text(const ScalingResult& result) {
  std::string text = result_text(result.tables) + "\n";
  text += format("# %d cores, ", result.machine.at("cores").get<int>()) +
          result.machine.at("cpu").get<std::string>() + "; medians of " +
          std::to_string(result.rounds) +
          (result.rounds == 1 ? " round" : " rounds") + "\n";
  for (const auto& table : result.tables) {
    text += "\n" + title_of(table.scaling) + "\n\n" +
            table_text(cells_of(table, result.target), {1, 2, 3, 4, 5, 6, 7});
  }
  return text;
}

ordered_json scaling_json(const ScalingResult& result) {
  ordered_json tables = ordered_json::array();
  for (const auto& table : result.tables) {
    ordered_json rows = ordered_json::array();
    for (const auto& row : table.rows) {
      rows.push_back({{"side", name_of(row.which.side)},
                      {"nproc", row.which.nproc},
                      {"command", row.which.command},
                      {"samples_per_s",
                       {{"median", row.samples_per_s},
                        {"min", row.least_samples_per_s},
                        {"max", row.most_samples_per_s}}},
                      {"speed_up", row.speed_up},
                      {"efficiency", row.efficiency},
                      {"core_seconds_per_1000_samples", row.core_seconds},
                      {"seconds", row.seconds},
                      {"target_s", row.target_s ? ordered_json(*row.target_s)
                                                : ordered_json()}});
    }
    tables.push_back(
        {{"scaling", name_of(table.scaling)}, {"rows", std::move(rows)}});
  }
  const std::string busy = load_warning(result.machine);
  return {{"format", kFormat},
          {"date", result.date},
          {"lockstep", result.lockstep},
          {"torch", result.torch},
          {"result", result_text(result.tables)},
          {"warning", busy.empty() ? ordered_json() : ordered_json(busy)},
          {"command", result.command},
          {"compare", result.compare.empty() ? ordered_json()
                                             : ordered_json(result.compare)},
          {"target", result.target.empty() ? ordered_json()
                                           : ordered_json(result.target)},
          {"rounds", result.rounds},
          {"machine", result.machine},
          {"tables", std::move(tables)}};
}

}  // namespace lockstep::internal

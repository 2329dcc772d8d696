#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/report/scaling_cases.h"
#include "lockstep/cli/report/scaling_run.h"

namespace lockstep::internal {

// The figures of one case in all rounds. Each figure is the median of the
// rounds.
struct ScalingRow {
  ScalingCase which;
  double samples_per_s;
  double least_samples_per_s;
  double most_samples_per_s;
  double seconds;
  // Until the target was met; nothing if that failed in a round, or if there is
  // no target.
  std::optional<double> target_s;
  // Compared with one process of one thread.
  double speed_up;
  // speed_up divided by the number of processes or threads: 1 is ideal.
  double efficiency;
  // The time of all cores together that 1,000 samples cost, in seconds.
  double core_seconds;
};

// A table of one kind of scaling. Its first row is one process of one thread.
struct ScalingTable {
  Scaling scaling;
  std::vector<ScalingRow> rows;
};

struct ScalingResult {
  std::string command;
  std::string compare;  // empty if there is none
  std::string target;   // empty if there is none
  int rounds;
  nlohmann::ordered_json machine;  // of machine_facts()
  std::string date;                // when the runs began, as utc_date()
  std::string lockstep;            // the versions
  std::string torch;
  std::vector<ScalingTable> tables;
};

// Returns the tables of the cases of cases_of(), of which `measured` has the
// measurements of all rounds, one or more for each case.
std::vector<ScalingTable> make_tables(
    const std::vector<ScalingCase>& cases,
    const std::vector<std::vector<ScalingMeasurement>>& measured);

// The columns of a table and its cells, as both the terminal and the page show
// them.
std::vector<std::vector<std::string>> cells_of(const ScalingTable& table,
                                               const std::string& target);
// "Weak scaling: each process computes as many samples in a step as one does."
std::string title_of(Scaling scaling);

// Returns the result in a sentence: how much faster the most ranks train than
// one process, and than what was measured beside them; and what to change if
// threads are faster.
std::string result_text(const std::vector<ScalingTable>& tables);
// Returns a sentence if the machine was busy before the runs, so that the
// figures say little; else nothing. `machine` is of machine_facts().
std::string load_warning(const nlohmann::ordered_json& machine);

// Returns the whole result for a terminal, and as one JSON document.
std::string scaling_text(const ScalingResult& result);
nlohmann::ordered_json scaling_json(const ScalingResult& result);

// Returns an HTML page that stands alone: the commands, the machine, and for
// each kind of scaling the table and a picture (SVG) of samples per second over
// the number of processes.
std::string scaling_page(const ScalingResult& result);

}  // namespace lockstep::internal

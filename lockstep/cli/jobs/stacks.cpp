#include "lockstep/cli/subcommands.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/job_view.h"
#include "lockstep/cli/jobs/jobs.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/launch/watch/source_finder.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

constexpr const char* kStacksName = "lockstep stacks";
constexpr std::chrono::milliseconds kStacksTime{10'000};
constexpr std::chrono::milliseconds kStacksInterval{20};

// Returns why a rank has written nothing.
std::string reason(const WorkerView& worker) {
  if (worker.worker.exit_code) return "it has ended";
  if (worker.state == "stopped") return "it is stopped by a signal";
  return "it does not answer; it may not be a program of Lockstep, or not have "
         "called init_process_group()";
}

struct JobStacks {
  std::string run_id{};
  std::vector<RankStacks> ranks{};
};

JobStacks stacks_of(const std::string& job) {
  JobLink link(find_job(job_argument(job)));
  const JobMoment first = look_at(link);
  const int32_t number = link.ask_stacks();
  const Deadline deadline = Deadline::after(kStacksTime);
  const auto answered = [&](int place) {
    const auto rank = link.board().read(place);
    // A rank may have answered a later request of another process, too.
    return rank && rank->stacks >= number;
  };
  const JobView view = view_of(first, first);
  JobStacks all{.run_id = view.status.run_id};
  for (const WorkerView& worker : view.workers) {
    if (worker.worker.rank < 0) continue;
    const int place = worker.worker.local_rank;
    const auto& known = first.ranks[static_cast<size_t>(place)];
    while (known && worker.state != "stopped" && !answered(place) &&
           !deadline.expired()) {
      std::this_thread::sleep_for(kStacksInterval);
      link.watch();
    }
    RankStacks rank{.rank = worker.worker.rank,
                    .pid = worker.worker.pid,
                    .operation = worker.operation};
    if (!answered(place) ||
        !take_stacks(view.status.attempt_directory, number, rank)) {
      rank.missing = reason(worker);
    }
    all.ranks.push_back(std::move(rank));
  }
  explain(all.ranks);
  return all;
}

std::string json_of(const JobStacks& all) {
  json ranks = json::array();
  for (const RankStacks& rank : all.ranks) {
    ranks.push_back(
        {{"rank", rank.rank},
         {"pid", rank.pid},
         {"operation",
          rank.operation.empty() ? json(nullptr) : json(rank.operation)},
         {"missing", rank.missing},
         {"flight_record", rank.flight_record},
         {"threads", json::parse(to_json(rank.threads))}});
  }
  const json document{
      {"format", 1}, {"run_id", all.run_id}, {"ranks", std::move(ranks)}};
  return document.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

std::string text_of(const JobStacks& all) {
  std::string text = stacks_text(all.ranks);
  std::string records;
  for (const RankStacks& rank : all.ranks) {
    // Nothing else is a path: "--help" would be read as an option.
    if (rank.flight_record.starts_with('/')) {
      records += " " + shell_word(rank.flight_record);
    }
  }
  if (records.empty()) return text;
  return text + "What the ranks did last: lockstep inspect flight" + records +
         "\n";
}

int print_stacks(const std::string& job, bool as_json) {
  try {
    const JobStacks all = stacks_of(job);
    write_output(as_json ? json_of(all) : text_of(all));
    const bool whole = std::ranges::all_of(
        all.ranks, [](const auto& rank) { return rank.missing.empty(); });
    return whole ? 0 : kSystemError;
  } catch (const std::invalid_argument& error) {
    write_message(kStacksName, error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    write_message(kStacksName, error.what());
    return kSystemError;
  }
}

}  // namespace

void add_stacks_command(CLI::App& app, int& exit_code) {
  CLI::App* stacks = add_command(
      app, "stacks", "Print where the threads of a running job are",
      "lockstep stacks [--json] [JOB]\n"
      "  Each rank on this host writes down the stacks of its threads and its "
      "flight\n  record, and goes on. JOB is a run id, or the process id of a "
      "lockstep run; without\n  it, the only job.\n"
      "Examples:\n"
      "  lockstep stacks\n"
      "  lockstep stacks 4711 --json\n"
      "Exit code 0: all ranks answered; 1: a rank did not; 2: there is no such "
      "job.");
  auto job = std::make_shared<std::string>();
  auto as_json = std::make_shared<bool>(false);
  add_job_argument(*stacks, *job);
  stacks->add_flag("--json", *as_json, "Print one JSON document");
  stacks->callback(
      [job, as_json, &exit_code] { exit_code = print_stacks(*job, *as_json); });
}

}  // namespace lockstep::internal

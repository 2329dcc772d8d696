#include "lockstep/cli/jobs/stacks.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/job_argument.h"
#include "lockstep/cli/jobs/job_view.h"
#include "lockstep/launch/exit_code.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kStacksName = "lockstep stacks";
constexpr std::chrono::milliseconds kStacksTime{10'000};
constexpr std::chrono::milliseconds kStacksInterval{20};

// Returns the stacks that a rank has written, and removes the file. Returns
// an empty object if there is no such file.
json take_file(const fs::path& path) {
  std::ifstream file(path);
  json stacks = json::parse(file, nullptr, false);
  std::error_code ignored;
  fs::remove(path, ignored);
  return stacks.is_object() ? stacks : json::object();
}

// Returns why a rank has written nothing.
std::string reason(const WorkerView& worker) {
  if (worker.worker.exit_code) return "it has ended";
  if (worker.state == "stopped") return "it is stopped by a signal";
  return "it does not answer; it may be no program of Lockstep, or not have "
         "called init_process_group()";
}

json stacks_of(const std::string& job) {
  JobLink link(find_job(job_argument(job)));
  const JobMoment first = look_at(link);
  const int32_t number = link.ask_stacks();
  const Deadline deadline = Deadline::after(kStacksTime);
  const auto answered = [&](int place) {
    const auto rank = link.board().read(place);
    return rank && rank->stacks == number;
  };
  const JobView view = view_of(first, first);
  json ranks = json::array();
  for (const WorkerView& worker : view.workers) {
    const int place = worker.worker.local_rank;
    const auto& known = first.ranks[static_cast<size_t>(place)];
    while (known && worker.state != "stopped" && !answered(place) &&
           !deadline.expired()) {
      std::this_thread::sleep_for(kStacksInterval);
      link.watch();
    }
    const fs::path file = fs::path(view.status.attempt_directory) /
                          StatusBoard::stacks_file(number, worker.worker.rank);
    const json written = answered(place) ? take_file(file) : json::object();
    json entry{{"rank", worker.worker.rank},
               {"pid", worker.worker.pid},
               {"operation", worker.operation.empty() ? json(nullptr)
                                                      : json(worker.operation)},
               {"missing", written.empty() ? reason(worker) : ""},
               {"flight_record", written.value("flight_record", "")},
               {"threads", written.value("threads", json::array())}};
    ranks.push_back(std::move(entry));
  }
  return {{"run_id", view.status.run_id}, {"ranks", std::move(ranks)}};
}

std::string stacks_text(const json& all) {
  std::string text;
  for (const json& rank : all["ranks"]) {
    text += "rank " + rank["rank"].dump() + ", process " + rank["pid"].dump();
    if (rank["operation"].is_string()) {
      text += ", in " + rank["operation"].get<std::string>();
    }
    const std::string missing = rank["missing"];
    text += missing.empty() ? "\n" : ": " + missing + "\n";
    for (const json& thread : rank["threads"]) {
      text += "  thread " + thread["thread"].dump() + ", " +
              thread["name"].get<std::string>();
      const std::string why = thread["missing"];
      text += why.empty() ? "\n" : ": " + why + "\n";
      for (const json& frame : thread["frames"]) {
        text += "    " + frame.get<std::string>() + "\n";
      }
    }
    text += "\n";
  }
  std::string records;
  for (const json& rank : all["ranks"]) {
    const std::string path = rank["flight_record"];
    if (!path.empty()) records += " " + path;
  }
  if (records.empty()) return text;
  return text + "What the ranks did last: lockstep inspect flight" + records +
         "\n";
}

int print_stacks(const std::string& job, bool as_json) {
  try {
    const json all = stacks_of(job);
    std::cout << (as_json ? all.dump(2) + "\n" : stacks_text(all))
              << std::flush;
    for (const json& rank : all["ranks"]) {
      if (!rank["missing"].get<std::string>().empty()) return kSystemError;
    }
    return 0;
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
  CLI::App* stacks = app.add_subcommand(
      "stacks", "Print where the threads of a running job are");
  stacks->formatter(make_help_formatter(
      "lockstep stacks [--json] [JOB]\n"
      "  Each rank on this host writes down the stacks of its threads and its "
      "flight\n  record, and goes on. JOB is a run id, or the process id of a "
      "lockstep run; without\n  it, the only job.\n"
      "Examples:\n"
      "  lockstep stacks\n"
      "  lockstep stacks 4711 --json\n"
      "Exit code 0: all ranks answered; 1: a rank did not; 2: there is no such "
      "job."));
  stacks->get_help_ptr()->description("Print this help and exit");
  auto job = std::make_shared<std::string>();
  auto as_json = std::make_shared<bool>(false);
  add_job_argument(*stacks, *job);
  stacks->add_flag("--json", *as_json, "Print one JSON document");
  stacks->callback(
      [job, as_json, &exit_code] { exit_code = print_stacks(*job, *as_json); });
}

}  // namespace lockstep::internal

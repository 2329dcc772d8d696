#include "lockstep/cli/jobs/jobs.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/view_text.h"
#include "lockstep/cli/subcommands.h"
#include "lockstep/cli/text.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

using std::chrono::milliseconds;

constexpr const char* kJobsName = "lockstep jobs";
constexpr milliseconds kListTime{10'000};
constexpr milliseconds kLeastAnswerTime{20};

struct ListedJob {
  RunningJob job{};
  std::optional<JobStatus> status{};  // nothing if its agent does not answer
  uid_t user = 0;                     // if it answers
  double running_seconds = 0;
};

// Asks each job. One that does not answer must not hold up the list, nor must
// hundreds of another user's: what is left of the time is shared.
std::vector<ListedJob> listed(const std::vector<RunningJob>& jobs) {
  const Deadline deadline = Deadline::after(kListTime);
  auto left = static_cast<int>(jobs.size());
  std::vector<ListedJob> all;
  for (const RunningJob& job : jobs) {
    ListedJob one{.job = job};
    const auto allowed = std::clamp(deadline.remaining() / left--,
                                    kLeastAnswerTime, JobLink::kAnswerTime);
    try {
      JobLink link(job, /*keeps_root=*/true, allowed);
      one.status = link.watch(milliseconds(0));
      one.user = link.owner().user;
      one.running_seconds =
          static_cast<double>(steady_ns() - one.status->started_ns) / 1e9;
    } catch (const std::exception&) {
      // It has ended since it was found, or its agent is stopped.
    }
    all.push_back(std::move(one));
  }
  const auto answers = [](const ListedJob& one) {
    return one.status.has_value();
  };
  if (std::ranges::all_of(all, answers)) return all;
  const auto now = running_jobs();
  std::erase_if(all, [&](const ListedJob& one) {
    return !answers(one) && std::ranges::find(now, one.job.socket,
                                              &RunningJob::socket) == now.end();
  });
  return all;
}

std::string jobs_json(const std::vector<ListedJob>& jobs) {
  json list = json::array();
  for (const ListedJob& one : jobs) {
    json row{{"name", name_of(one.job)},
             {"run_id", one.job.run_id},
             {"agent_pid", one.job.agent_pid},
             {"launcher_pid", one.job.launcher_pid},
             {"state", nullptr}};
    if (const auto& status = one.status) {
      const auto running = std::ranges::count_if(
          status->workers, [](const auto& each) { return !each.exit_code; });
      row.update({{"run_id", status->run_id},
                  {"uid", one.user},
                  {"state", name_of(status->state)},
                  {"running_seconds", one.running_seconds},
                  {"workers", status->workers.size()},
                  {"workers_running", running},
                  {"world_size", status->world_size},
                  {"node_rank", status->node_rank},
                  {"nnodes", status->nnodes},
                  {"restart", status->restart},
                  {"max_restarts", status->max_restarts},
                  {"program", status->program}});
    }
    list.push_back(std::move(row));
  }
  const json document{{"format", 1}, {"jobs", std::move(list)}};
  return document.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

std::string user_name(uid_t user) {
  const passwd* entry = ::getpwuid(user);
  return entry == nullptr ? std::to_string(user) : shown_line(entry->pw_name);
}

// Has a column of users if some job is another user's.
std::string table_of(const std::vector<ListedJob>& jobs) {
  std::vector<std::vector<std::string>> rows{
      {"job", "run id", "state", "for", "workers", "restarts", "program"}};
  for (const ListedJob& one : jobs) {
    if (const auto& status = one.status) {
      rows.push_back({name_of(one.job), shown_line(status->run_id),
                      name_of(status->state),
                      duration_text(one.running_seconds), running_text(*status),
                      std::to_string(status->restart) + " of " +
                          std::to_string(status->max_restarts),
                      program_text(status->program)});
    } else {
      rows.push_back({name_of(one.job), shown_line(one.job.run_id), "no answer",
                      "-", "-", "-", shown_line(one.job.command)});
    }
  }
  const bool names_users = std::ranges::any_of(jobs, [](const auto& one) {
    return one.status && one.user != ::geteuid();
  });
  if (!names_users) return table_text(rows, {0, 3, 4, 5});
  rows[0].insert(rows[0].begin() + 1, "user");
  for (size_t i = 0; i < jobs.size(); ++i) {
    auto& row = rows[i + 1];
    row.insert(row.begin() + 1, jobs[i].status ? user_name(jobs[i].user) : "-");
  }
  return table_text(rows, {0, 4, 5, 6});
}

int print_jobs(bool as_json) {
  try {
    const auto jobs = listed(running_jobs());
    if (as_json) {
      write_output(jobs_json(jobs));
    } else if (jobs.empty()) {
      write_message(kJobsName, "no job of this user runs on this host");
    } else {
      write_output(table_of(jobs));
    }
    return 0;
  } catch (const std::exception& error) {
    write_message(kJobsName, error.what());
    return kSystemError;
  }
}

}  // namespace

std::string jobs_text(const std::vector<RunningJob>& jobs) {
  return table_of(listed(jobs));
}

void add_jobs_command(CLI::App& app, int& exit_code) {
  CLI::App* jobs = add_command(
      app, "jobs", "List the running jobs of this user",
      "lockstep jobs [--json]\n"
      "  Lists the jobs that this user runs on this host (root: those of all "
      "users). The\n  first column is what lockstep status and the others take "
      "as JOB.\n"
      "Examples:\n"
      "  lockstep jobs\n"
      "  lockstep jobs --json\n"
      "Exit code 0: the list was printed, also if there is no job.");
  auto as_json = std::make_shared<bool>(false);
  jobs->add_flag("--json", *as_json, "Print one JSON document");
  jobs->callback([as_json, &exit_code] { exit_code = print_jobs(*as_json); });
}

}  // namespace lockstep::internal

#include "lockstep/cli/subcommands.h"

#include <chrono>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/jobs.h"
#include "lockstep/cli/jobs/view_text.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

constexpr const char* kStatusName = "lockstep status";
// The time from which rates are counted.
constexpr std::chrono::milliseconds kRateTime{1'000};

int print_status(const std::string& job, bool as_json) {
  try {
    // JSON is for programs, which expect the document of one job.
    if (const auto all = running_jobs();
        job.empty() && all.size() > 1 && !as_json) {
      write_output(jobs_text(all) +
                   "\nlockstep status JOB shows one of them.\n");
      return 0;
    }
    JobLink link(find_job(job_argument(job)));
    const JobMoment before = look_at(link);
    std::this_thread::sleep_for(kRateTime);
    const JobView view = view_of(before, look_at(link));
    if (as_json) {
      write_output(view_json(view));
    } else {
      // Its lines are safe for a terminal, and may have colours.
      std::cout << view_text(view, stdout_has_colours()) << std::flush;
    }
    return 0;
  } catch (const std::invalid_argument& error) {
    write_message(kStatusName, error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    write_message(kStatusName, error.what());
    return kSystemError;
  }
}

}  // namespace

void add_status_command(CLI::App& app, int& exit_code) {
  CLI::App* status = add_command(
      app, "status", "Print how a running job and its ranks do",
      "lockstep status [--json] [JOB]\n"
      "  JOB is a run id, or the process id of a lockstep run on this host; "
      "without it,\n  the only job, or a list if there are several (lockstep "
      "jobs). Takes a second,\n  from which rates are counted.\n"
      "Examples:\n"
      "  lockstep status\n"
      "  lockstep status 4711 --json\n"
      "Exit code 0: the job runs; 2: there is no such job.");
  auto job = std::make_shared<std::string>();
  auto as_json = std::make_shared<bool>(false);
  add_job_argument(*status, *job);
  status->add_flag("--json", *as_json, "Print one JSON document");
  status->callback(
      [job, as_json, &exit_code] { exit_code = print_status(*job, *as_json); });
}

}  // namespace lockstep::internal

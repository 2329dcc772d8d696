#include "lockstep/cli/subcommands.h"

#include <cstdio>
#include <ctime>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/base/endpoint.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/run_arguments.h"
#include "lockstep/cli/run_options.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

constexpr const char* kRunName = "lockstep run";

void say(std::string_view text) { write_message(kRunName, text); }

// Writes a message with the host and the time, as one log may hold messages of
// several nodes.
void say_of_node(const std::string& host, std::string_view text) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  std::tm local{};
  localtime_r(&now.tv_sec, &local);
  char time[40];
  const size_t length =
      std::strftime(time, sizeof(time), "%Y-%m-%d %H:%M:%S", &local);
  std::snprintf(time + length, sizeof(time) - length, ".%03ld",
                now.tv_nsec / 1'000'000);
  write_message(std::string(kRunName) + " [" + host + " " + time + "]", text);
}

JobReport outcome_so_far(const RunOptions& options) {
  const WorkerGroupOptions& workers = options.agent.workers;
  return {.run_id = workers.run_id,
          .program = workers.program.arguments,
          .host = options.agent.host_name,
          .max_restarts = workers.max_restarts};
}

void write_report(const std::optional<std::filesystem::path>& file,
                  const JobReport& outcome, const LocalAgent::Report& report) {
  if (!file) return;
  try {
    write_job_report(outcome, *file);
  } catch (const std::exception& error) {
    report(error.what());
  }
}

// Runs in the agent's process. The member starts its thread here, since no
// thread survives a fork.
int run_agent(const RunOptions& options, RunDirectory& directory,
              std::optional<StorePort> port,
              std::optional<MetricsEndpoint> metrics, GuardianLink link) {
  LocalAgent::Report report = say;
  if (options.job) {
    report = [host = options.agent.host_name](const std::string& text) {
      say_of_node(host, text);
    };
  }
  JobReport outcome = outcome_so_far(options);
  outcome.exit_code = kSystemError;
  const auto explain = [&](const std::exception& error) {
    report(error.what());
    outcome.cause = error.what();
  };
  try {
    std::unique_ptr<JobMember> job;
    if (options.job) job = std::make_unique<JobMember>(*options.job);
    LocalAgent agent(options.agent, directory, std::move(port), std::move(link),
                     report, std::move(job));
    if (metrics) agent.serve_metrics(std::move(*metrics));
    outcome.exit_code = agent.run(outcome);
  } catch (const ProgramError& error) {
    explain(error);
    outcome.exit_code = error.exit_code();
  } catch (const std::exception& error) {
    explain(error);
  }
  // The launcher does this too, but it may have been killed.
  directory.end(/*success=*/outcome.exit_code == 0);
  write_report(options.report, outcome, report);
  return outcome.exit_code;
}

// Finds the address of rank 0's store in numbers, once: a look-up at a restart
// could fail.
void set_own_address(LocalAgentOptions& agent,
                     std::chrono::milliseconds allowed) {
  if (const auto own = find_own_address(agent.master_addr, allowed, say)) {
    agent.store_addr = *own;
    return;
  }
  say("address " + agent.master_addr +
      " is not one of this host: with one node its workers meet at 127.0.0.1; "
      "for several nodes give --nnodes");
  agent.master_addr = agent.store_addr = "127.0.0.1";
}

int launch(const RunArguments& arguments) {
  RunOptions options = run_options(arguments);
  LocalAgentOptions& agent = options.agent;
  std::optional<StorePort> port;
  if (!options.job) {
    set_own_address(agent, options.address_timeout);
    port = StorePort::hold(agent.store_addr, agent.master_port);
  }
  std::optional<MetricsEndpoint> metrics;
  if (options.metrics) {
    metrics.emplace(MetricsEndpoint::listen(*options.metrics));
    const std::string& host = names_every_interface(options.metrics->address)
                                  ? agent.host_name
                                  : options.metrics->address;
    say("metrics: http://" + Endpoint{host, metrics->port()}.text() +
        "/metrics" +
        (metrics->wants_token() ? " with the token of the job's secret" : ""));
  }
  RunDirectory directory =
      RunDirectory::create(options.log_dir, agent.workers.run_id);

  for (const auto& warning : options.warnings) say(warning);
  if (arguments.standalone &&
      (!arguments.rdzv_endpoint.empty() || !arguments.rdzv_id.empty())) {
    say("--rdzv-endpoint and --rdzv-id are ignored with --standalone");
  }
  if (agent.workers.omp_threads.empty() &&
      limits_omp_threads(agent.workers.nproc_per_node, current_environment())) {
    say("OMP_NUM_THREADS is not set: every worker gets OMP_NUM_THREADS=1; "
        "--omp-threads=auto gives each its share of the cores");
  }
  JobReport outcome = outcome_so_far(options);
  const GuardedEnd end = run_guarded(
      [&](GuardianLink link) {
        return run_agent(options, directory, std::move(port),
                         std::move(metrics), std::move(link));
      },
      agent.ending_allowance(), agent.ending_signals,
      [&] {
        // Rank 0 listens on the port's socket: as long as anybody has it, no
        // later attempt can have the same port.
        port.reset();
        metrics.reset();
      });
  if (end.killed_by != 0) {
    outcome.exit_code = end.exit_code;
    outcome.cause =
        "the launcher's agent was killed by " + signal_name(end.killed_by) +
        (end.all_ended ? "; all workers were killed"
                       : "; a worker outlived SIGKILL and is left behind");
    say(outcome.cause);
    write_report(options.report, outcome, say);
  }
  return end.exit_code;
}

int launch_or_explain(RunArguments arguments,
                      std::vector<std::string> remaining) {
  std::string reason;
  int exit_code = kSystemError;
  try {
    strip_numbers(arguments);
    set_command(arguments, std::move(remaining));
    // The report of an earlier job must not be taken for this one's, even if
    // this one cannot begin. Not before there is a program: a value that was
    // forgotten would make the program the report.
    if (!arguments.report.empty() && !is_written_through(arguments.report)) {
      std::error_code ignored;
      std::filesystem::remove(arguments.report, ignored);
    }
    return launch(arguments);
  } catch (const ProgramError& error) {
    reason = error.what();
    exit_code = error.exit_code();
  } catch (const std::invalid_argument& error) {
    reason = error.what();
    exit_code = kUsageError;
  } catch (const std::exception& error) {
    reason = error.what();
  }
  say(reason);
  // Tells the other nodes, which would wait for this one in vain.
  if (auto job = decline_options(arguments, reason, exit_code)) {
    decline_job(std::move(*job));
  }
  return exit_code;
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  CLI::App* run = add_command(
      app, "run", "Start one worker for each rank and watch them (as torchrun)",
      "lockstep run [OPTIONS] PROGRAM [ARGUMENTS...]\n"
      "  A PROGRAM that ends in .py runs under Python. Options are also taken "
      "with\n  underscores, and from PET_... variables as torchrun does: "
      "PET_NPROC_PER_NODE=2.");
  // Everything from the first argument that is not an option belongs to the
  // program. After "--" CLI11 leaves that with the parent.
  run->prefix_command();
  app.prefix_command();
  auto arguments = std::make_shared<RunArguments>();
  add_run_arguments(*run, *arguments);
  run->callback([run, &app, arguments, &exit_code] {
    exit_code = launch_or_explain(*arguments, run->remaining_size() > 0
                                                  ? run->remaining()
                                                  : app.remaining());
  });
}

}  // namespace lockstep::internal

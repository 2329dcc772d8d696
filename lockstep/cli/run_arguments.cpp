#include "lockstep/cli/run_arguments.h"

#include <array>
#include <stdexcept>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/cli/command_line.h"

namespace lockstep::internal {
namespace {

// torchrun's options that this launcher lacks, and what to do instead.
struct Unsupported {
  const char* option;
  const char* advice;
};
constexpr std::array kUnsupported{
    Unsupported{"--start-method", "every worker is a program of its own"},
    Unsupported{"--event-log-handler", "there is no event log"},
    Unsupported{"--run-path", "give the script as the program"},
    Unsupported{"--duplicate-stdout-filters", "filter the files of --log-dir"},
    Unsupported{"--duplicate-stderr-filters", "filter the files of --log-dir"},
    Unsupported{"--logs-specs", "use --log-dir, --redirects and --tee"},
    Unsupported{"--numa-binding", "start the program with numactl"},
    Unsupported{"--signals-to-handle",
                "TERM, INT, HUP, QUIT, USR1 and USR2 are always forwarded"},
    Unsupported{"--virtual-local-rank",
                "select the device by LOCAL_RANK in the program"},
};

const Unsupported* find_unsupported(const std::string& argument) {
  for (const auto& entry : kUnsupported) {
    if (canonical_option(argument) == entry.option) return &entry;
  }
  return nullptr;
}

void add_worker_options(CLI::App& run, RunArguments& arguments) {
  add_spelled_flag(run, "--standalone", arguments.standalone,
                   "One host, a free port (as without this option)")
      ->group("Workers");
  add_spelled_option(run, "--nproc-per-node", arguments.nproc_per_node,
                     "Workers: a number, auto, cpu or gpu [1]")
      ->group("Workers");
  add_spelled_option(run, "--max-restarts", arguments.max_restarts,
                     "Restarts of all workers after a failure [0]")
      ->group("Workers");
  add_spelled_option(run, "--role", arguments.role,
                     "ROLE_NAME of the workers [default]")
      ->group("Workers");
  add_spelled_flag(run, "--module", arguments.module,
                   "The program is a Python module (python -m)", "-m")
      ->group("Workers");
  add_spelled_flag(run, "--no-python", arguments.no_python,
                   "Execute the program as it is, even a .py")
      ->group("Workers");
}

void add_output_options(CLI::App& run, RunArguments& arguments) {
  add_spelled_flag(run, "--prefix-lines", arguments.prefix_lines,
                   "Put [role rank]: before each line on the console")
      ->group("Output");
  add_spelled_option(run, "--log-dir", arguments.log_dir,
                     "Keep logs of every attempt and rank here")
      ->group("Output");
  add_spelled_option(run, "--redirects", arguments.redirects,
                     "Streams that go to the logs only: 1 stdout, 2 stderr, "
                     "3 both; or by rank, 0:3,1:2 [0]",
                     "-r")
      ->group("Output");
  add_spelled_option(run, "--tee", arguments.tee,
                     "Streams that go to the console by prefixed lines, and "
                     "to the logs if any [0]",
                     "-t")
      ->group("Output");
  add_spelled_option(run, "--local-ranks-filter", arguments.local_ranks_filter,
                     "Show only these ranks on the console: 0,2")
      ->group("Output");
  add_spelled_option(run, "--metrics-port", arguments.metrics_port,
                     "Serve metrics for Prometheus on 127.0.0.1; 0: a free "
                     "port [none]")
      ->group("Output");
}

void add_shutdown_options(CLI::App& run, RunArguments& arguments) {
  add_spelled_option(run, "--shutdown-timeout", arguments.shutdown_timeout,
                     "Seconds from a forwarded signal to SIGKILL [30]")
      ->group("Shutdown");
  add_spelled_option(run, "--failure-shutdown-timeout",
                     arguments.failure_shutdown_timeout,
                     "Seconds from SIGTERM to SIGKILL for the others once a "
                     "worker has failed [0.5]")
      ->group("Shutdown");
  add_spelled_option(run, "--leftover-timeout", arguments.leftover_timeout,
                     "Seconds from SIGTERM to SIGKILL for what the workers "
                     "leave behind [0.2]")
      ->group("Shutdown");
  add_spelled_option(run, "--monitor-interval", arguments.monitor_interval,
                     "Accepted, without effect: failures are noticed at once")
      ->group("Shutdown");
}

void add_rendezvous_options(CLI::App& run, RunArguments& arguments) {
  const auto add = [&run](const char* name, std::string& value,
                          const char* description) {
    add_spelled_option(run, name, value, description)->group("Rendezvous");
  };
  add("--nnodes", arguments.nnodes, "Nodes: one `lockstep run` on each [1]");
  add("--node-rank", arguments.node_rank,
      "Rank of this node [static: 0; c10d: the order of arrival]");
  add("--rdzv-backend", arguments.rdzv_backend,
      "static: node rank 0 hosts the agents' store; c10d: the node whose "
      "address the endpoint is [static]");
  add("--rdzv-endpoint", arguments.rdzv_endpoint,
      "HOST[:PORT] of the agents' store, the same for all nodes [port: c10d "
      "29400, static 29500]");
  add("--rdzv-id", arguments.rdzv_id,
      "Name of the job, TORCHELASTIC_RUN_ID of the workers [random]");
  add("--rdzv-conf", arguments.rdzv_conf,
      "join_timeout=SECONDS to wait for all nodes [600], timeout=SECONDS for "
      "the store alone, is_host=true|false, keep_alive_interval=SECONDS [5], "
      "keep_alive_max_attempt=NUMBER of them that may be missed [3]; separated "
      "by commas");
  add("--master-addr", arguments.master_addr,
      "One node: address of rank 0's store; several: the host of node rank 0, "
      "if no endpoint is given [127.0.0.1]");
  add("--master-port", arguments.master_port,
      "One node: port of rank 0's store [a free one in every attempt]; "
      "several: "
      "port of the agents' store [29500]");
  add("--local-addr", arguments.local_addr,
      "Address by which the others reach this node [found out]");
}

}  // namespace

void refuse_unsupported_environment() {
  for (const auto& entry : kUnsupported) {
    const std::string name = environment_name(entry.option);
    const auto value = get_env(name.c_str());
    if (!value || *value == "0") continue;
    throw std::invalid_argument("environment variable " + name +
                                " sets an option of torchrun that is not "
                                "supported: " +
                                entry.advice + "; unset it");
  }
}

void add_run_arguments(CLI::App& run, RunArguments& arguments) {
  add_worker_options(run, arguments);
  add_output_options(run, arguments);
  add_shutdown_options(run, arguments);
  add_rendezvous_options(run, arguments);
}

void set_command(RunArguments& arguments, std::vector<std::string> remaining) {
  if (remaining.empty()) {
    throw std::invalid_argument(
        "no program was given; say lockstep run [options] program args...");
  }
  const std::string& first = remaining.front();
  if (!first.starts_with('-')) {
    arguments.command = std::move(remaining);
    return;
  }
  if (const Unsupported* known = find_unsupported(first)) {
    throw std::invalid_argument(
        std::string("option ") + known->option +
        " of torchrun is not supported: " + known->advice);
  }
  throw std::invalid_argument("unknown option " + first +
                              "; see lockstep run --help");
}

}  // namespace lockstep::internal

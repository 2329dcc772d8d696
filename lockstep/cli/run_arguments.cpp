#include "lockstep/cli/run_arguments.h"

#include <stdexcept>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/cli/command_line.h"

namespace lockstep::internal {
namespace {

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
  add_spelled_option(run, "--standby", arguments.standby,
                     "Additional processes of this node that wait in "
                     "init_process_group() and take the places of workers at a "
                     "restart [0]")
      ->group("Workers");
  run.add_flag("--heal{replace}", arguments.heal,
               "A standby process takes the place of a worker that fails, and "
               "the others stay, if the program's training can be healed; "
               "counts as a restart. With --heal=shrink the others go on "
               "without it if no process comes")
      ->envname(environment_name("--heal"))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->group("Workers");
  add_spelled_option(run, "--hang-timeout", arguments.hang_timeout,
                     "Seconds without progress after which a worker hangs, "
                     "which is a failure [never]")
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
  add_spelled_flag(run, "--run-path", arguments.run_path,
                   "The program is a Python script, whatever its name")
      ->group("Workers");
  add_spelled_option(run, "--start-method", arguments.start_method,
                     "Accepted, without effect: every worker is a program of "
                     "its own [spawn]")
      ->group("Workers");
}

void add_core_options(CLI::App& run, RunArguments& arguments) {
  add_spelled_option(run, "--numa-binding", arguments.numa_binding,
                     "Bind each worker to CPUs near its GPU, or by equal "
                     "numbers to the NUMA nodes: node, socket, exclusive or "
                     "core-complex")
      ->group("Cores and GPUs");
  add_spelled_option(run, "--omp-threads", arguments.omp_threads,
                     "OMP_NUM_THREADS of each worker: a number, or auto: its "
                     "share of the cores [1 for several workers, if the "
                     "variable is not set]")
      ->group("Cores and GPUs");
  add_spelled_flag(run, "--virtual-local-rank", arguments.virtual_local_rank,
                   "LOCAL_RANK is 0 for all workers, and each sees one GPU")
      ->group("Cores and GPUs");
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
  add_spelled_option(run, "--duplicate-stdout-filters",
                     arguments.duplicate_stdout_filters,
                     "Texts separated by commas: lines of stdout by --tee that "
                     "hold one also go into filtered_stdout.log")
      ->group("Output");
  add_spelled_option(run, "--duplicate-stderr-filters",
                     arguments.duplicate_stderr_filters,
                     "The same for stderr and filtered_stderr.log")
      ->group("Output");
  add_spelled_option(run, "--logs-specs", arguments.logs_specs,
                     "default is accepted: torchrun loads plugins of Python "
                     "[default]")
      ->group("Output");
  add_spelled_option(run, "--event-log-handler", arguments.event_log_handler,
                     "null is accepted: there is no event log [null]")
      ->group("Output");
  add_spelled_option(run, "--metrics-port", arguments.metrics_port,
                     "Serve metrics for Prometheus; 0 for a free port [none]")
      ->group("Output");
  add_spelled_option(run, "--metrics-address", arguments.metrics_address,
                     "Where; other hosts send a token of the job's secret "
                     "[127.0.0.1]")
      ->group("Output");
  add_spelled_flag(run, "--metrics-insecure", arguments.metrics_insecure,
                   "Every host may read the metrics, without a token")
      ->group("Output");
  add_spelled_option(run, "--report", arguments.report,
                     "Write how the job ended to this file, as JSON")
      ->group("Output");
}

void add_shutdown_options(CLI::App& run, RunArguments& arguments) {
  add_spelled_option(run, "--signals-to-handle", arguments.signals_to_handle,
                     "Signals that are forwarded and end the job "
                     "[SIGTERM,SIGINT,SIGHUP,SIGQUIT]")
      ->group("Shutdown");
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
                     "Accepted, without effect: failures are noticed at once "
                     "[0.1]")
      ->group("Shutdown");
}

void add_rendezvous_option(CLI::App& command, const char* name,
                           std::string& value, const char* description) {
  add_spelled_option(command, name, value, description)->group("Rendezvous");
}

void add_elastic_options(CLI::App& run, RunArguments& arguments) {
  add_rendezvous_option(
      run, "--max-membership-changes", arguments.max_membership_changes,
      "How often all workers may start again because a node came or went "
      "[unlimited]");
  add_rendezvous_option(
      run, "--scale-up-wait", arguments.scale_up_wait,
      "Seconds that a node which comes waits at most for the program's next "
      "snapshot [300]");
  add_rendezvous_option(
      run, "--leave-out-after", arguments.leave_out_after,
      "FAILURES[:WITHIN[:FOR]]: leave out a node whose workers failed so often "
      "within these seconds (600), for these seconds (600) [never]");
  add_spelled_flag(
      run, "--spare", arguments.spare,
      "This node waits until one of the --nnodes is lost, and "
      "takes its place: with --heal in the step that runs, else at "
      "the restart")
      ->group("Rendezvous");
}

}  // namespace

void add_meeting_arguments(CLI::App& command, RunArguments& arguments,
                           const MeetingTexts& texts) {
  const auto add = [&command](const char* name, std::string& value,
                              const char* description) {
    add_rendezvous_option(command, name, value, description);
  };
  add("--nnodes", arguments.nnodes, texts.nnodes);
  add("--node-rank", arguments.node_rank,
      "Rank of this node [the order of arrival; static: 0]");
  add("--rdzv-secret-file", arguments.rdzv_secret_file,
      "File of mode 0600 whose first line is the job's secret, the same on all "
      "nodes [environment variable LOCKSTEP_JOB_SECRET]");
  add_spelled_flag(command, "--rdzv-insecure", arguments.rdzv_insecure,
                   "Meet without a secret: on a trusted network only")
      ->group("Rendezvous");
  add("--rdzv-endpoint", arguments.rdzv_endpoint,
      "HOST[:PORT] of the agents' store, the same for all nodes; port 29500, "
      "c10d 29400");
  const std::string conf =
      std::string("join_timeout=SECONDS to wait for all nodes [") +
      texts.join_timeout +
      "], timeout=SECONDS for the store alone, is_host=true|false, "
      "keep_alive_interval=SECONDS [5], keep_alive_max_attempt=NUMBER of them "
      "that may be missed [6], " +
      texts.more_conf + "store_type=tcp; separated by commas";
  add("--rdzv-conf", arguments.rdzv_conf, conf.c_str());
  add("--rdzv-id", arguments.rdzv_id,
      "Name of the job, TORCHELASTIC_RUN_ID of the workers [random]");
  add("--master-addr", arguments.master_addr,
      "One node: address of rank 0's store; several: the host of node rank 0, "
      "if no endpoint is given [127.0.0.1]");
  add("--master-port", arguments.master_port,
      "One node: port of rank 0's store; several: of the agents' store [a free "
      "one in every attempt; several: 29500]");
  add("--local-addr", arguments.local_addr,
      "Address by which the others reach this node [found out]");
}

void add_run_arguments(CLI::App& run, RunArguments& arguments) {
  add_worker_options(run, arguments);
  add_core_options(run, arguments);
  add_output_options(run, arguments);
  add_shutdown_options(run, arguments);
  add_meeting_arguments(
      run, arguments,
      {.nnodes = "Nodes: one `lockstep run` on each; or MIN:MAX, between which "
                 "they come and go [1]",
       .join_timeout = "600",
       .more_conf =
           "last_call_timeout=SECONDS for more nodes than MIN [30], "});
  add_elastic_options(run, arguments);
  add_rendezvous_option(
      run, "--rdzv-backend", arguments.rdzv_backend,
      "How the agents meet: lockstep, by TLS; static and c10d, at LibTorch's "
      "store, without authentication [lockstep]");
  add_rendezvous_option(
      run, "--worker-store", arguments.worker_store,
      "Where the ranks of C++ programs meet: agent, at a store of the "
      "launcher's; tcp, at rank 0's TCPStore; auto, at the launcher's unless "
      "their backend is one that Python has, too [auto]");
}

void strip_numbers(RunArguments& arguments) {
  RunArguments& all = arguments;
  for (std::string* text : {&all.nproc_per_node,
                            &all.nnodes,
                            &all.node_rank,
                            &all.master_addr,
                            &all.master_port,
                            &all.local_addr,
                            &all.rdzv_endpoint,
                            &all.max_restarts,
                            &all.max_membership_changes,
                            &all.scale_up_wait,
                            &all.leave_out_after,
                            &all.standby,
                            &all.monitor_interval,
                            &all.shutdown_timeout,
                            &all.failure_shutdown_timeout,
                            &all.leftover_timeout,
                            &all.omp_threads,
                            &all.metrics_port,
                            &all.metrics_address,
                            &all.hang_timeout}) {
    *text = stripped(*text);
  }
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
  throw std::invalid_argument("unknown option " + first +
                              "; see lockstep run --help");
}

}  // namespace lockstep::internal

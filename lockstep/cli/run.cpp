#include "lockstep/cli/run.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/launch/local_agent.h"
#include "lockstep/launch/process_count.h"
#include "lockstep/launch/worker_environment.h"

namespace lockstep {
namespace {

constexpr const char* kName = "lockstep run";
constexpr int kUsageError = 2;
constexpr int kSystemError = 1;

void say(std::string_view text) { write_message(kName, text); }

// The options as they were written.
struct RunArguments {
  bool standalone = false;
  std::string nproc_per_node = "1";
  std::string nnodes = "1";
  std::string node_rank = "0";
  std::string master_addr = "127.0.0.1";
  std::string master_port = "0";
  std::string rdzv_backend = "static";
  std::string rdzv_endpoint;
  std::string rdzv_id;
  std::string max_restarts = "0";
  std::string monitor_interval = "0.1";
  std::string shutdown_timeout;
  std::string failure_shutdown_timeout = "0.5";
  std::string role = "default";
  bool module = false;
  bool no_python = false;
  std::string log_dir;
  std::string redirects = "0";
  std::string tee = "0";
  std::string local_ranks_filter;
  bool prefix_lines = false;
  std::vector<std::string> command;
};

// torchrun's options that this launcher lacks, and what to do instead.
struct Unsupported {
  const char* option;
  const char* advice;
};
constexpr std::array kUnsupported{
    Unsupported{"--rdzv-conf", "there is no rendezvous on one host"},
    Unsupported{"--start-method", "every worker is a program of its own"},
    Unsupported{"--event-log-handler", "there is no event log"},
    Unsupported{"--run-path", "give the script as the program"},
    Unsupported{"--duplicate-stdout-filters", "filter the files of --log-dir"},
    Unsupported{"--duplicate-stderr-filters", "filter the files of --log-dir"},
    Unsupported{"--local-addr", "use --master-addr"},
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

std::chrono::milliseconds parse_seconds(std::string_view option,
                                        const std::string& text) {
  double seconds = -1;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() ||
      !(seconds >= 0 && seconds <= 86'400)) {
    throw std::invalid_argument(std::string(option) + " is \"" + text +
                                "\"; allowed are seconds from 0 to 86400, "
                                "such as 0.5");
  }
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

// What torchrun makes of "1" and "1:1", and a clear no to all else.
void check_single_node(const RunArguments& arguments) {
  const std::string& nnodes = arguments.nnodes;
  const size_t colon = nnodes.find(':');
  const int64_t least =
      parse_int("--nnodes", nnodes.substr(0, colon), 1, 65536);
  const int64_t most =
      colon == std::string::npos
          ? least
          : parse_int("--nnodes", nnodes.substr(colon + 1), least, 65536);
  if (most > 1) {
    throw std::invalid_argument(
        "--nnodes is \"" + nnodes +
        "\": several hosts are not supported yet; give --nnodes=1");
  }
  if (parse_int("--node-rank", arguments.node_rank, 0, 65535) != 0) {
    throw std::invalid_argument("--node-rank is " + arguments.node_rank +
                                "; with one host it can only be 0");
  }
  if (arguments.rdzv_backend != "static" && arguments.rdzv_backend != "c10d") {
    throw std::invalid_argument("--rdzv-backend is \"" +
                                arguments.rdzv_backend +
                                "\"; allowed on one host are static and c10d, "
                                "which mean the same there");
  }
}

void set_store_address(const RunArguments& arguments,
                       LocalAgentOptions& options) {
  options.master_addr = arguments.master_addr;
  options.master_port = static_cast<int>(
      parse_int("--master-port", arguments.master_port, 0, 65535));
  if (arguments.rdzv_endpoint.empty() || arguments.standalone) return;
  const std::string& endpoint = arguments.rdzv_endpoint;
  size_t colon = endpoint.rfind(':');
  // In "[::1]" the colons are the address's.
  if (endpoint.ends_with(']')) colon = std::string::npos;
  options.master_addr = endpoint.substr(0, colon);
  if (colon != std::string::npos) {
    options.master_port = static_cast<int>(parse_int(
        "the port of --rdzv-endpoint", endpoint.substr(colon + 1), 0, 65535));
  }
}

std::string random_run_id() {
  std::ifstream source("/proc/sys/kernel/random/uuid");
  std::string id;
  std::getline(source, id);
  return id.empty() ? "none" : id;
}

OutputOptions output_options(const RunArguments& arguments) {
  OutputOptions output;
  output.redirects = StreamSelection::parse("--redirects", arguments.redirects);
  output.tee = StreamSelection::parse("--tee", arguments.tee);
  output.prefix_lines = arguments.prefix_lines;
  if (!arguments.local_ranks_filter.empty()) {
    output.local_ranks_filter =
        parse_local_ranks("--local-ranks-filter", arguments.local_ranks_filter);
  }
  if (auto prefix = get_env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")) {
    output.prefix_template = *prefix;
  }
  if (!output.redirects.empty() && arguments.log_dir.empty()) {
    throw std::invalid_argument(
        "--redirects writes into files; say where by --log-dir");
  }
  return output;
}

ProgramKind program_kind(const RunArguments& arguments) {
  if (arguments.module && arguments.no_python) {
    throw std::invalid_argument(
        "--module and --no-python exclude each other; give one of them");
  }
  if (arguments.module) return ProgramKind::python_module;
  return arguments.no_python ? ProgramKind::executable : ProgramKind::by_name;
}

LocalAgentOptions agent_options(const RunArguments& arguments) {
  refuse_unsupported_environment();
  check_single_node(arguments);
  LocalAgentOptions options;
  WorkerGroupOptions& workers = options.workers;
  workers.nproc_per_node = resolve_process_count(arguments.nproc_per_node);
  workers.max_restarts = static_cast<int>(
      parse_int("--max-restarts", arguments.max_restarts, 0, 1'000'000));
  workers.role = arguments.role;
  workers.run_id = arguments.rdzv_id.empty() || arguments.standalone
                       ? random_run_id()
                       : arguments.rdzv_id;
  workers.output = output_options(arguments);
  set_store_address(arguments, options);
  parse_seconds("--monitor-interval", arguments.monitor_interval);
  if (!arguments.shutdown_timeout.empty()) {
    options.shutdown_timeout =
        parse_seconds("--shutdown-timeout", arguments.shutdown_timeout);
  } else if (auto value = get_env("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")) {
    options.shutdown_timeout = parse_seconds(
        "environment variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT", *value);
  }
  options.failure_shutdown_timeout = parse_seconds(
      "--failure-shutdown-timeout", arguments.failure_shutdown_timeout);
  workers.program = resolve_program(arguments.command, program_kind(arguments));
  return options;
}

// CLI11 leaves in `remaining` what follows the first argument that is neither
// an option that it knows nor an option's value.
void check_is_program(const std::vector<std::string>& remaining) {
  if (remaining.empty()) {
    throw std::invalid_argument(
        "no program was given; say lockstep run [options] program args...");
  }
  const std::string& first = remaining.front();
  if (!first.starts_with('-')) return;
  if (const Unsupported* known = find_unsupported(first)) {
    throw std::invalid_argument(
        std::string("option ") + known->option +
        " of torchrun is not supported: " + known->advice);
  }
  throw std::invalid_argument("unknown option " + first +
                              "; see lockstep run --help");
}

int run_agent(const LocalAgentOptions& options, RunDirectory& directory,
              StorePort port, GuardianLink link) {
  int exit_code = kSystemError;
  try {
    exit_code =
        LocalAgent(options, directory, std::move(port), std::move(link), say)
            .run();
  } catch (const ProgramError& error) {
    say(error.what());
    exit_code = error.exit_code();
  } catch (const std::exception& error) {
    say(error.what());
  }
  // The launcher does the same, but may have been killed.
  directory.remove_if_temporary();
  return exit_code;
}

int launch(const RunArguments& arguments) {
  const LocalAgentOptions options = agent_options(arguments);
  StorePort port = StorePort::hold(options.master_addr, options.master_port);
  std::optional<std::string> log_dir;
  if (!arguments.log_dir.empty()) log_dir = arguments.log_dir;
  RunDirectory directory =
      RunDirectory::create(log_dir, options.workers.run_id);

  if (arguments.standalone &&
      (!arguments.rdzv_endpoint.empty() || !arguments.rdzv_id.empty())) {
    say("--rdzv-endpoint and --rdzv-id are ignored with --standalone");
  }
  if (limits_omp_threads(options.workers.nproc_per_node,
                         current_environment())) {
    say("OMP_NUM_THREADS is not set: every worker gets OMP_NUM_THREADS=1");
  }
  const GuardedEnd end = run_guarded([&](GuardianLink link) {
    return run_agent(options, directory, std::move(port), std::move(link));
  });
  if (end.killed_by != 0) {
    say("the launcher's agent was killed by " + signal_name(end.killed_by) +
        (end.all_ended ? "; all workers were killed"
                       : "; a worker outlived SIGKILL and is left behind"));
  }
  return end.exit_code;
}

int launch_or_explain(RunArguments arguments,
                      std::vector<std::string> remaining) {
  try {
    check_is_program(remaining);
    arguments.command = std::move(remaining);
    return launch(arguments);
  } catch (const ProgramError& error) {
    say(error.what());
    return error.exit_code();
  } catch (const std::invalid_argument& error) {
    say(error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    say(error.what());
    return kSystemError;
  }
}

void add_worker_options(CLI::App& run, RunArguments& arguments) {
  add_spelled_flag(run, "--standalone", arguments.standalone,
                   "One host, a free port (what happens anyway)")
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
                   "Execute the program as it is, a .py too")
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
  add_spelled_option(run, "--monitor-interval", arguments.monitor_interval,
                     "Accepted; failures are noticed at once")
      ->group("Shutdown");
}

void add_rendezvous_options(CLI::App& run, RunArguments& arguments) {
  add_spelled_option(run, "--nnodes", arguments.nnodes,
                     "Hosts: 1 is all that is supported yet")
      ->group("Rendezvous");
  add_spelled_option(run, "--node-rank", arguments.node_rank,
                     "Rank of this host: 0")
      ->group("Rendezvous");
  add_spelled_option(run, "--master-addr", arguments.master_addr,
                     "Address of rank 0's store [127.0.0.1]")
      ->group("Rendezvous");
  add_spelled_option(run, "--master-port", arguments.master_port,
                     "Port of rank 0's store [a free one in every round]")
      ->group("Rendezvous");
  add_spelled_option(run, "--rdzv-backend", arguments.rdzv_backend,
                     "static or c10d, the same on one host")
      ->group("Rendezvous");
  add_spelled_option(run, "--rdzv-endpoint", arguments.rdzv_endpoint,
                     "HOST[:PORT] in place of --master-addr, --master-port")
      ->group("Rendezvous");
  add_spelled_option(run, "--rdzv-id", arguments.rdzv_id,
                     "TORCHELASTIC_RUN_ID of the workers [random]")
      ->group("Rendezvous");
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  CLI::App* run = app.add_subcommand(
      "run", "Start one worker for each rank and watch them (as torchrun)");
  run->formatter(make_help_formatter(
      "lockstep run [OPTIONS] PROGRAM [ARGUMENTS...]\n"
      "  A PROGRAM that ends in .py runs under Python. Options are also taken "
      "with\n  underscores, and from PET_... variables as torchrun does: "
      "PET_NPROC_PER_NODE=2."));
  run->get_help_ptr()->description("Print this help and exit");
  // From the first argument that is no option, all is the program's. After
  // "--" CLI11 leaves it with the parent.
  run->prefix_command();
  app.prefix_command();
  auto arguments = std::make_shared<RunArguments>();
  add_worker_options(*run, *arguments);
  add_output_options(*run, *arguments);
  add_shutdown_options(*run, *arguments);
  add_rendezvous_options(*run, *arguments);
  run->callback([run, &app, arguments, &exit_code] {
    exit_code = launch_or_explain(*arguments, run->remaining_size() > 0
                                                  ? run->remaining()
                                                  : app.remaining());
  });
}

}  // namespace lockstep

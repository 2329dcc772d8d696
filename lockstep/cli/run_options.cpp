#include "lockstep/cli/run_options.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/control_groups.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/launch/nodes/job_secret.h"
#include "lockstep/launch/nodes/node_protocol.h"
#include "lockstep/launch/process/cpu_topology.h"
#include "lockstep/launch/process/process_count.h"
#include "lockstep/launch/process/visible_gpus.h"

namespace lockstep::internal {
namespace {

constexpr int kMostThreads = 4096;

// Local rank n has GPU n, as torchrun assumes it. If there are fewer GPUs than
// workers, the workers compute on CPUs.
std::vector<int> nodes_of_workers(const CpuTopology& topology, int workers) {
  return visible_gpus() >= workers ? numa_nodes_of_gpus()
                                   : spread_over_nodes(topology, workers);
}

std::vector<std::string> one_gpu_each(int workers) {
  std::vector<std::string> gpus;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int at = 0; at < workers; ++at) gpus.push_back(std::to_string(at));
    return gpus;
  }
  const std::string_view list = visible;
  // No GPU at all, in the two ways in which that is said.
  if (list.empty() || list == "-1") return std::vector<std::string>(workers);
  gpus = named_gpus(list);
  if (std::ssize(gpus) < workers) {
    throw std::invalid_argument(
        "--virtual-local-rank gives each worker one GPU of "
        "CUDA_VISIBLE_DEVICES, which is \"" +
        std::string(visible) + "\" and names " + std::to_string(gpus.size()) +
        ", and there are " + std::to_string(workers) +
        " workers; name one for each (a number, GPU-... or MIG-...), or start "
        "fewer");
  }
  return gpus;
}

int parse_threads(const std::string& text) {
  try {
    return static_cast<int>(parse_int("--omp-threads", text, 1, kMostThreads));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(error.what()) + ", or auto");
  }
}

// Sets which CPUs, how many threads and which GPU each worker gets, by
// --numa-binding, --omp-threads and --virtual-local-rank. Requires the number
// of workers. Throws std::invalid_argument of one line.
void place_workers(const RunArguments& arguments, WorkerGroupOptions& workers) {
  const int count = workers.nproc_per_node;
  if (arguments.virtual_local_rank) workers.only_gpus = one_gpu_each(count);

  const bool share = arguments.omp_threads == "auto";
  if (!share && !arguments.omp_threads.empty()) {
    workers.omp_threads.assign(static_cast<size_t>(count),
                               parse_threads(arguments.omp_threads));
  }
  if (!share && arguments.numa_binding.empty()) return;
  const std::set<int> allowed = allowed_cpus();
  const CpuTopology topology = read_cpu_topology(allowed);
  if (!arguments.numa_binding.empty()) {
    workers.cpus =
        bind_to_cpus(parse_numa_binding(arguments.numa_binding), topology,
                     nodes_of_workers(topology, count), count);
  }
  if (share) {
    workers.omp_threads = share_of_cores(
        topology,
        workers.cpus.empty()
            ? std::vector<std::set<int>>(static_cast<size_t>(count), allowed)
            : workers.cpus,
        granted_cores());
  }
}

constexpr int kMostNodes = 65536;
// How long a node that cannot start looks for the others.
constexpr std::chrono::milliseconds kMostToTell{10'000};
constexpr int kDefaultPort = 29500;      // as torchrun's static rendezvous
constexpr int kDefaultC10dPort = 29400;  // as torchrun's c10d rendezvous

std::chrono::milliseconds parse_seconds(std::string_view option,
                                        const std::string& text,
                                        int least = 0) {
  double seconds = -1;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() ||
      !(seconds >= least && seconds <= 86'400)) {
    throw std::invalid_argument(std::string(option) + " is \"" + text +
                                "\"; allowed are seconds from " +
                                std::to_string(least) + " to 86400, such as " +
                                std::to_string(least) + ".5");
  }
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

// How many nodes a job may have.
struct NodeRange {
  int fewest = 1;
  int most = 1;

  bool elastic() const { return fewest < most; }
};

NodeRange parse_nnodes(const std::string& text) {
  const size_t colon = text.find(':');
  try {
    const int64_t least =
        parse_int("--nnodes", stripped(text.substr(0, colon)), 1, kMostNodes);
    const int64_t most =
        colon == std::string::npos
            ? least
            : parse_int("--nnodes", stripped(text.substr(colon + 1)), least,
                        kMostNodes);
    return {static_cast<int>(least), static_cast<int>(most)};
  } catch (const std::invalid_argument&) {
    throw std::invalid_argument(
        "--nnodes is \"" + text + "\"; allowed are a number from 1 to " +
        std::to_string(kMostNodes) + ", or MIN:MAX with MIN not above MAX");
  }
}

bool parse_flag(const std::string& name, std::string value) {
  std::ranges::transform(value, value.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  for (const char* yes : {"1", "true", "t", "yes", "y"}) {
    if (value == yes) return true;
  }
  for (const char* no : {"0", "false", "f", "no", "n"}) {
    if (value == no) return false;
  }
  throw std::invalid_argument(name + " of --rdzv-conf is \"" + value +
                              "\"; allowed are true and false");
}

// Keys of torchrun's rendezvous that have no effect here: times, and others.
constexpr std::array kForeignTimes{"close_timeout", "heartbeat_timeout",
                                   "read_timeout"};
constexpr std::array kForeignConf{"use_libuv", "rank"};

void refuse_store_type(const std::string& type) {
  if (type == "tcp") return;
  throw std::invalid_argument(
      "store_type of --rdzv-conf is \"" + type +
      "\"; the agents' store listens on TCP: allowed is tcp, or leave it out");
}

// Applies `text`, of the form "KEY=VALUE,KEY=VALUE".
void apply_rdzv_conf(const std::string& text, JobMemberOptions& job,
                     std::vector<std::string>& warnings) {
  std::optional<std::chrono::milliseconds> timeout;
  KeepAlive& keep_alive = job.node.keep_alive;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const size_t equals = item.find('=');
    const std::string name = stripped(item.substr(0, equals));
    const std::string value =
        equals == item.npos ? "" : stripped(item.substr(equals + 1));
    const std::string option = name + " of --rdzv-conf";
    if (name == "join_timeout") {
      job.join_timeout = parse_seconds(option, value);
    } else if (name == "timeout") {
      timeout = parse_seconds(option, value);
    } else if (name == "is_host") {
      job.store.is_host = parse_flag(name, value);
    } else if (name == "keep_alive_interval") {
      keep_alive.interval = parse_seconds(option, value);
    } else if (name == "keep_alive_max_attempt") {
      keep_alive.max_attempt =
          static_cast<int>(parse_int(option, value, 1, 1'000'000));
    } else if (name == "store_type") {
      refuse_store_type(value);
    } else if (name == "last_call_timeout") {
      job.node.elastic_options.last_call = parse_seconds(option, value);
      if (!job.node.elastic()) {
        warnings.push_back(option +
                           " has no effect, as the number of nodes is fixed");
      }
    } else if (std::ranges::find(kForeignTimes, name) != kForeignTimes.end()) {
      parse_seconds(option, value);
      warnings.push_back(option + " is one of torchrun's and has no effect");
    } else if (std::ranges::find(kForeignConf, name) != kForeignConf.end()) {
      warnings.push_back(option + " is one of torchrun's and has no effect");
    } else {
      throw std::invalid_argument(
          "--rdzv-conf has \"" + std::string(item) +
          "\"; allowed are join_timeout=SECONDS, timeout=SECONDS, "
          "is_host=true|false, keep_alive_interval=SECONDS, "
          "keep_alive_max_attempt=NUMBER and last_call_timeout=SECONDS, "
          "separated by commas");
    }
  }
  if (keep_alive.allowance() < std::chrono::seconds(1)) {
    throw std::invalid_argument(
        "keep_alive_interval times keep_alive_max_attempt of --rdzv-conf is " +
        seconds_text(keep_alive.allowance()) +
        ", after which a silent node is given up; allowed is 1 s or more");
  }
  job.store.timeout = timeout.value_or(job.join_timeout);
  // The last call must end before the wait for nodes does.
  auto& last_call = job.node.elastic_options.last_call;
  last_call = std::min(last_call, job.join_timeout * 3 / 4);
}

// Removes the brackets: "[::1]" and "::1" mean the same, but the workers'
// libraries know only the second.
std::string bare(const std::string& address) {
  return address.starts_with('[') && address.ends_with(']')
             ? address.substr(1, address.size() - 2)
             : address;
}

int parse_port(const std::string& text, int if_not_given) {
  return text.empty()
             ? if_not_given
             : static_cast<int>(parse_int("--master-port", text, 0, 65535));
}

// Sets the address and port of rank 0's store, if there is one node.
void set_store_address(const RunArguments& arguments,
                       LocalAgentOptions& options) {
  if (!arguments.node_rank.empty() &&
      parse_int("--node-rank", arguments.node_rank, 0, kMostNodes) != 0) {
    throw std::invalid_argument("--node-rank is " + arguments.node_rank +
                                "; with one node (--nnodes=1) it can only be "
                                "0");
  }
  for (const auto* address : {&arguments.master_addr, &arguments.local_addr}) {
    if (address->empty()) continue;
    options.master_addr = bare(*address);
    break;
  }
  options.master_port = parse_port(arguments.master_port, 0);
  if (arguments.rdzv_endpoint.empty() || arguments.standalone) return;
  const Endpoint endpoint = parse_endpoint(
      "--rdzv-endpoint", arguments.rdzv_endpoint, options.master_port);
  options.master_addr = endpoint.host;
  options.master_port = endpoint.port;
}

// Throws if the last endpoint is one of those before: a node would look for the
// others at the place where it waits itself.
void refuse_repeated(const std::vector<Endpoint>& endpoints,
                     const std::string& given) {
  const Endpoint& last = endpoints.back();
  for (size_t at = 0; at + 1 < endpoints.size(); ++at) {
    const Endpoint& one = endpoints[at];
    if (one.port != last.port ||
        (one.host != last.host &&
         !(names_loopback(one.host) && names_loopback(last.host)))) {
      continue;
    }
    throw std::invalid_argument("--rdzv-endpoint is " + given +
                                ", which names " + last.text() +
                                " twice; give endpoints on different hosts or "
                                "with different ports");
  }
}

// Returns the endpoints of --rdzv-endpoint=A,B, or the one of --master-addr.
std::vector<Endpoint> store_endpoints(const RunArguments& arguments,
                                      bool c10d) {
  if (!arguments.rdzv_endpoint.empty()) {
    std::vector<Endpoint> endpoints;
    std::string rest = arguments.rdzv_endpoint;
    while (true) {
      const size_t comma = rest.find(',');
      endpoints.push_back(
          parse_endpoint("--rdzv-endpoint", stripped(rest.substr(0, comma)),
                         c10d ? kDefaultC10dPort : kDefaultPort));
      refuse_repeated(endpoints, arguments.rdzv_endpoint);
      if (comma == rest.npos) return endpoints;
      rest.erase(0, comma + 1);
    }
  }
  if (arguments.rdzv_backend != "static" && arguments.master_addr.empty()) {
    throw std::invalid_argument(
        "several nodes need an address where they meet; give all of them the "
        "same --rdzv-endpoint=HOST[:PORT], with the HOST of one of them");
  }
  const std::string host =
      arguments.master_addr.empty() ? "127.0.0.1" : arguments.master_addr;
  return {{bare(host), parse_port(arguments.master_port,
                                  c10d ? kDefaultC10dPort : kDefaultPort)}};
}

void refuse_every_interface(const std::string& option,
                            const std::string& host) {
  if (!names_every_interface(host)) return;
  throw std::invalid_argument(
      option + " is " + host +
      ", which means every interface, not an address that a node can reach; "
      "give the name or an address of the host");
}

// Sets how the agents prove to each other that they belong to the job.
void set_secret(const RunArguments& arguments, JobMemberOptions& job,
                std::vector<std::string>& warnings) {
  if (arguments.rdzv_backend != "lockstep") {
    if (!arguments.rdzv_secret_file.empty() || arguments.rdzv_insecure) {
      throw std::invalid_argument(
          "--rdzv-secret-file and --rdzv-insecure are for "
          "--rdzv-backend=lockstep; --rdzv-backend is " +
          arguments.rdzv_backend + ", which knows no secret; leave them out");
    }
    job.store.open = open_c10d_store;
    return;
  }
  job.store.secret = job_secret(arguments.rdzv_secret_file);
  if (job.store.secret && arguments.rdzv_insecure) {
    throw std::invalid_argument(
        "--rdzv-insecure does without a secret, and one is given by "
        "LOCKSTEP_JOB_SECRET or --rdzv-secret-file; leave one of them out");
  }
  if (!job.store.secret && !arguments.rdzv_insecure) {
    throw std::invalid_argument(
        "the agents of several nodes need a secret that they share; set "
        "LOCKSTEP_JOB_SECRET on every node to the same random text (head -c 32 "
        "/dev/urandom | base64), give a file with --rdzv-secret-file, or, on a "
        "trusted network, --rdzv-insecure");
  }
  if (arguments.rdzv_insecure) {
    warnings.push_back(
        "--rdzv-insecure: the agents meet without authentication and "
        "encryption, for trusted networks only");
  }
}

// Parses "FAILURES[:WITHIN[:FOR]]".
void set_leave_out(const std::string& text, ElasticOptions& options) {
  const std::string option = "--leave-out-after";
  const size_t first = text.find(':');
  options.failures =
      static_cast<int>(parse_int(option, text.substr(0, first), 1, 1'000'000));
  if (first == text.npos) return;
  const size_t second = text.find(':', first + 1);
  options.within = parse_seconds(
      option, text.substr(first + 1, second == text.npos ? text.npos
                                                         : second - first - 1));
  if (second == text.npos) return;
  options.cooling = parse_seconds(option, text.substr(second + 1));
}

// Sets the rules for nodes that come and go.
void set_elastic(const RunArguments& arguments, const NodeRange& nodes,
                 NodeDescription& node, std::vector<std::string>& warnings) {
  node.nnodes = nodes.most;
  node.min_nodes = nodes.fewest;
  ElasticOptions& options = node.elastic_options;
  if (!arguments.max_membership_changes.empty()) {
    node.max_membership_changes = static_cast<int>(
        parse_int("--max-membership-changes", arguments.max_membership_changes,
                  0, 1'000'000));
  }
  options.scale_up_wait =
      parse_seconds("--scale-up-wait", arguments.scale_up_wait);
  if (!arguments.leave_out_after.empty()) {
    try {
      set_leave_out(arguments.leave_out_after, options);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(error.what()) +
                                  "; the form is FAILURES[:WITHIN[:FOR]]");
    }
  }
  if (nodes.elastic() && arguments.rdzv_backend == "static") {
    throw std::invalid_argument(
        "--rdzv-backend is static, in which nodes have fixed ranks, and "
        "--nnodes is " +
        arguments.nnodes + "; give one number, or another backend");
  }
  if (!nodes.elastic() && (node.max_membership_changes || options.failures)) {
    warnings.push_back(
        "--max-membership-changes and --leave-out-after have no effect, as the "
        "number of nodes is fixed");
    node.max_membership_changes.reset();
  }
}

// Returns where the nodes meet and how long they wait for each other.
JobMemberOptions meeting_options(const RunArguments& arguments,
                                 const NodeRange& nodes,
                                 std::vector<std::string>& warnings) {
  if (arguments.standalone) {
    throw std::invalid_argument(
        "--standalone means one node, and --nnodes is " + arguments.nnodes +
        "; leave one of them out");
  }
  const bool c10d = arguments.rdzv_backend == "c10d";
  JobMemberOptions job;
  set_elastic(arguments, nodes, job.node, warnings);
  apply_rdzv_conf(arguments.rdzv_conf, job, warnings);
  std::vector<Endpoint> endpoints = store_endpoints(arguments, c10d);
  for (const Endpoint& endpoint : endpoints) {
    if (endpoint.port == 0) {
      throw std::invalid_argument(
          "nodes cannot meet at port 0; give all of them the same port from 1 "
          "to 65535");
    }
    refuse_every_interface(arguments.rdzv_endpoint.empty()
                               ? "--master-addr"
                               : "the host of --rdzv-endpoint",
                           endpoint.host);
  }
  job.store.endpoint = endpoints.front();
  endpoints.erase(endpoints.begin());
  job.further_endpoints = std::move(endpoints);
  job.local_addr = bare(arguments.local_addr);
  refuse_every_interface("--local-addr", job.local_addr);
  NodeDescription& node = job.node;
  node.host = host_name();
  node.pid = getpid();
  if (!arguments.node_rank.empty()) {
    node.node_rank = static_cast<int>(
        parse_int("--node-rank", arguments.node_rank, 0, nodes.most - 1));
  } else if (arguments.rdzv_backend == "static") {
    node.node_rank = 0;
  }
  // --master-addr is by its meaning the host of node rank 0.
  const bool rank_decides =
      arguments.rdzv_backend == "static" ||
      (!c10d && arguments.rdzv_endpoint.empty() && node.node_rank);
  if (rank_decides && !job.store.is_host) {
    job.store.is_host = *node.node_rank == 0;
  }
  if (!arguments.rdzv_id.empty()) node.run_id = arguments.rdzv_id;
  set_secret(arguments, job, warnings);
  return job;
}

JobMemberOptions job_options(const RunArguments& arguments,
                             const NodeRange& nodes,
                             const LocalAgentOptions& agent,
                             std::vector<std::string>& warnings) {
  JobMemberOptions job = meeting_options(arguments, nodes, warnings);
  NodeDescription& node = job.node;
  node.nproc_per_node = agent.workers.nproc_per_node;
  node.role = agent.workers.role;
  node.max_restarts = agent.workers.max_restarts;
  return job;
}

// It is not an error, as nodes with different numbers of workers may be given
// the same options.
void warn_of_absent_rank(std::string_view option, int highest,
                         int nproc_per_node,
                         std::vector<std::string>& warnings) {
  if (highest < nproc_per_node) return;
  warnings.push_back(std::string(option) + " names local rank " +
                     std::to_string(highest) +
                     ", but the highest local rank of this node is " +
                     std::to_string(nproc_per_node - 1));
}

OutputOptions output_options(const RunArguments& arguments, int nproc_per_node,
                             std::vector<std::string>& warnings) {
  const auto parse_streams = [&](std::string_view option,
                                 const std::string& text) {
    auto streams = StreamSelection::parse(option, text);
    warn_of_absent_rank(option, streams.highest_rank(), nproc_per_node,
                        warnings);
    return streams;
  };
  OutputOptions output;
  output.redirects = parse_streams("--redirects", arguments.redirects);
  output.tee = parse_streams("--tee", arguments.tee);
  output.prefix_lines = arguments.prefix_lines;
  if (!arguments.local_ranks_filter.empty()) {
    output.local_ranks_filter =
        parse_local_ranks("--local-ranks-filter", arguments.local_ranks_filter);
    warn_of_absent_rank("--local-ranks-filter",
                        *output.local_ranks_filter->rbegin(), nproc_per_node,
                        warnings);
  }
  if (auto prefix = get_env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")) {
    output.prefix_template = *prefix;
  }
  output.stdout_filters = parse_line_filters(
      "--duplicate-stdout-filters", arguments.duplicate_stdout_filters);
  output.stderr_filters = parse_line_filters(
      "--duplicate-stderr-filters", arguments.duplicate_stderr_filters);
  const bool filters =
      !output.stdout_filters.empty() || !output.stderr_filters.empty();
  const bool by_lines = !output.tee.empty() || output.prefix_lines;
  if (filters && (arguments.log_dir.empty() || !by_lines)) {
    warnings.push_back(
        "--duplicate-stdout-filters and --duplicate-stderr-filters have no "
        "effect without " +
        std::string(by_lines ? "--log-dir" : "--tee or --prefix-lines"));
  }
  if (!output.redirects.empty() && arguments.log_dir.empty()) {
    warnings.push_back(
        "--redirects writes into files and has no effect without --log-dir");
    output.redirects = {};
  }
  return output;
}

std::optional<std::chrono::milliseconds> hang_timeout(
    const RunArguments& arguments) {
  if (arguments.hang_timeout.empty()) return std::nullopt;
  try {
    return parse_seconds("--hang-timeout", arguments.hang_timeout, 1);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        error.what() +
        std::string("; give more than the program's longest step takes"));
  }
}

// Returns where the report goes. Learns now, and not after days, that it cannot
// be written.
std::optional<std::filesystem::path> report_file(
    const RunArguments& arguments) {
  if (arguments.report.empty()) return std::nullopt;
  const std::filesystem::path file =
      std::filesystem::absolute(arguments.report);
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored) ||
      ::access(file.parent_path().c_str(), W_OK | X_OK) != 0) {
    throw std::invalid_argument(
        "--report is \"" + arguments.report +
        "\", and no file can be written there; give a file in a folder that "
        "exists and can be written");
  }
  return file;
}

ProgramKind program_kind(const RunArguments& arguments) {
  if (arguments.run_path) return ProgramKind::python_script;
  if (arguments.module && arguments.no_python) {
    throw std::invalid_argument(
        "--module and --no-python exclude each other; give one of them");
  }
  if (arguments.module) return ProgramKind::python_module;
  return arguments.no_python ? ProgramKind::executable : ProgramKind::by_name;
}

// Refuses values of torchrun's options that would have an effect there and
// cannot have one here.
void refuse_foreign_values(const RunArguments& arguments) {
  const std::string& method = arguments.start_method;
  if (method != "spawn" && method != "fork" && method != "forkserver") {
    throw std::invalid_argument("--start-method is \"" + method +
                                "\"; allowed are spawn, fork and forkserver, "
                                "which have no effect");
  }
  const std::string& handler = arguments.event_log_handler;
  if (handler != "null") {
    throw std::invalid_argument(
        "--event-log-handler is \"" + handler +
        "\", but the launcher has no event log; allowed is null. To see how a "
        "job is, ask lockstep status");
  }
  if (arguments.logs_specs != "default") {
    throw std::invalid_argument(
        "--logs-specs is \"" + arguments.logs_specs +
        "\", a plugin of Python, which the launcher cannot load; allowed is "
        "default. Use --log-dir, --redirects and --tee");
  }
  const std::string& backend = arguments.rdzv_backend;
  if (backend == "etcd" || backend == "etcd-v2") {
    throw std::invalid_argument(
        "--rdzv-backend is \"" + backend +
        "\", but the agents meet at a store that one of them hosts, and need "
        "no etcd server; leave the option out, or give lockstep, static or "
        "c10d, with --rdzv-endpoint at a host of the job");
  }
}

// Sets at which store the workers meet, whose program is known.
void set_worker_store(const RunArguments& arguments, RunOptions& options) {
  const std::string& choice = arguments.worker_store;
  WorkerGroupOptions& workers = options.agent.workers;
  if (!choice.empty() && choice != "auto" && choice != "agent" &&
      choice != "tcp") {
    throw std::invalid_argument("--worker-store is \"" + choice +
                                "\"; allowed are auto, agent and tcp");
  }
  if (choice == "agent" && workers.program.is_python) {
    throw std::invalid_argument(
        "--worker-store is agent, but " + arguments.command.front() +
        " runs under Python, whose torch.distributed meets at a TCPStore; "
        "leave the option out");
  }
  if (choice == "agent" && options.job &&
      arguments.rdzv_backend != "lockstep") {
    throw std::invalid_argument(
        "--worker-store is agent, but --rdzv-backend is " +
        arguments.rdzv_backend +
        ", whose store takes no workers of several nodes; leave one of them "
        "out");
  }
  workers.worker_store = choice;
  workers.serves_store = !workers.program.is_python;
  if (options.job) {
    options.job->serves_workers =
        workers.serves_store && arguments.rdzv_backend == "lockstep";
  }
}

// The identifier is part of the name of a folder.
void require_short_id(const std::string& rdzv_id) {
  constexpr size_t kMost = 200;
  if (rdzv_id.size() <= kMost) return;
  throw std::invalid_argument(
      "--rdzv-id has " + std::to_string(rdzv_id.size()) +
      " characters; allowed are at most " + std::to_string(kMost));
}

LocalAgentOptions agent_options(const RunArguments& arguments,
                                std::vector<std::string>& warnings) {
  LocalAgentOptions options;
  WorkerGroupOptions& workers = options.workers;
  workers.nproc_per_node = resolve_process_count(arguments.nproc_per_node);
  workers.max_restarts = static_cast<int>(
      parse_int("--max-restarts", arguments.max_restarts, 0, 1'000'000));
  workers.role = arguments.role;
  require_short_id(arguments.rdzv_id);
  workers.run_id = arguments.rdzv_id.empty() || arguments.standalone
                       ? random_id()
                       : arguments.rdzv_id;
  workers.output = output_options(arguments, workers.nproc_per_node, warnings);
  place_workers(arguments, workers);
  options.host_name = host_name();
  options.ending_signals =
      parse_signals("--signals-to-handle", arguments.signals_to_handle);
  workers.signals_to_handle = arguments.signals_to_handle;
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
  options.hang_timeout = hang_timeout(arguments);
  options.leftover_timeout =
      parse_seconds("--leftover-timeout", arguments.leftover_timeout);
  return options;
}

// Requires the program to be known.
void set_standby(const RunArguments& arguments, RunOptions& options) {
  constexpr int kMost = 4096;
  const auto processes =
      static_cast<int>(parse_int("--standby", arguments.standby, 0, kMost));
  if (processes == 0) return;
  if (arguments.virtual_local_rank) {
    throw std::invalid_argument(
        "--standby and --virtual-local-rank exclude each other: a standby "
        "process may look at the GPUs before it is known which one is its own; "
        "leave out one of them");
  }
  const Program& program = options.agent.workers.program;
  require_standby_program(program.path, program.arguments);
  if (options.agent.workers.max_restarts == 0 &&
      !parse_nnodes(arguments.nnodes).elastic()) {
    options.warnings.push_back(
        "--standby has no effect without restarts; give --max-restarts");
    return;
  }
  options.agent.standby = processes;
}

// Requires set_worker_store() and set_standby().
void set_heal(const RunArguments& arguments, RunOptions& options) {
  const std::string& given = arguments.heal;
  if (given.empty() || given == "0" || given == "false") return;
  WorkerGroupOptions& workers = options.agent.workers;
  workers.shrinks = given == "shrink";
  if (!workers.shrinks && given != "replace" && given != "1" &&
      given != "true") {
    throw std::invalid_argument("--heal is \"" + given +
                                "\"; allowed are replace and shrink");
  }
  if (workers.max_restarts == 0) {
    throw std::invalid_argument(
        "--heal replaces a worker as often as --max-restarts says, and that is "
        "0; give --max-restarts");
  }
  if (options.agent.standby == 0 && !workers.shrinks) {
    throw std::invalid_argument(
        "--heal gives the place of a worker that fails to a standby process, "
        "and there is none; give --standby, or --heal=shrink to go on with "
        "fewer ranks");
  }
  const std::string store = workers.worker_store.empty()
                                ? get_env("LOCKSTEP_WORKER_STORE").value_or("")
                                : workers.worker_store;
  const bool nodes_have_none = options.job && !options.job->serves_workers;
  if (store == "tcp" || nodes_have_none) {
    throw std::invalid_argument(
        std::string("--heal tells the workers in the launcher's store, which "
                    "they do not have with ") +
        (nodes_have_none ? "--rdzv-backend=" + arguments.rdzv_backend
                         : "--worker-store=tcp") +
        "; leave out one of them");
  }
  workers.heals = true;
  if (options.job) {
    options.job->node.heals = true;
    options.job->node.shrinks = workers.shrinks;
  }
}

void set_spare(const RunArguments& arguments, RunOptions& options) {
  if (!arguments.spare) return;
  if (!options.job || options.job->node.elastic()) {
    throw std::invalid_argument(
        "--spare is for a job with a fixed number of two or more nodes, and "
        "--nnodes is " +
        arguments.nnodes + "; of MIN:MAX nodes each takes part");
  }
  if (arguments.rdzv_backend != "lockstep") {
    throw std::invalid_argument("--spare needs --rdzv-backend=lockstep, and " +
                                arguments.rdzv_backend + " was given");
  }
  if (!arguments.node_rank.empty()) {
    throw std::invalid_argument(
        "--spare takes the rank of a node that is lost, and --node-rank is " +
        arguments.node_rank + "; leave out one of them");
  }
  if (options.agent.workers.max_restarts == 0) {
    throw std::invalid_argument(
        "--spare has no effect without restarts; give all nodes the same "
        "--max-restarts");
  }
  options.job->node.is_spare = true;
  options.job->store.is_host = false;
}

std::optional<MetricsOptions> metrics_options(const RunArguments& arguments) {
  if (arguments.metrics_port.empty()) {
    if (!arguments.metrics_address.empty() || arguments.metrics_insecure) {
      throw std::invalid_argument(
          "--metrics-address and --metrics-insecure are for --metrics-port; "
          "give a port, or 0 for a free one");
    }
    return std::nullopt;
  }
  MetricsOptions metrics{
      .port = static_cast<int>(
          parse_int("--metrics-port", arguments.metrics_port, 0, 65'535)),
      .is_open = arguments.metrics_insecure};
  if (!arguments.metrics_address.empty()) {
    metrics.address = arguments.metrics_address;
    if (!metrics.is_open)
      metrics.secret = job_secret(arguments.rdzv_secret_file);
  }
  return metrics;
}

}  // namespace

RunOptions run_options(const RunArguments& arguments) {
  refuse_foreign_values(arguments);
  constexpr std::array kBackends{"lockstep", "static", "c10d"};
  if (std::ranges::find(kBackends, arguments.rdzv_backend) == kBackends.end()) {
    throw std::invalid_argument("--rdzv-backend is \"" +
                                arguments.rdzv_backend +
                                "\"; allowed are lockstep, static and c10d");
  }
  RunOptions options;
  options.agent = agent_options(arguments, options.warnings);
  if (const NodeRange nodes = parse_nnodes(arguments.nnodes); nodes.most > 1) {
    options.job =
        job_options(arguments, nodes, options.agent, options.warnings);
  } else {
    set_store_address(arguments, options.agent);
    JobMemberOptions ignored;
    set_elastic(arguments, nodes, ignored.node, options.warnings);
    apply_rdzv_conf(arguments.rdzv_conf, ignored, options.warnings);
    options.address_timeout = ignored.store.timeout;
    // A mistake here would be noticed only when there are several nodes.
    if (!arguments.rdzv_secret_file.empty()) {
      job_secret(arguments.rdzv_secret_file);
    }
  }
  if (!arguments.log_dir.empty()) options.log_dir = arguments.log_dir;
  options.metrics = metrics_options(arguments);
  options.report = report_file(arguments);
  options.agent.workers.program =
      resolve_program(arguments.command, program_kind(arguments));
  set_worker_store(arguments, options);
  set_standby(arguments, options);
  set_heal(arguments, options);
  set_spare(arguments, options);
  return options;
}

std::optional<JobMemberOptions> rendezvous_options(
    const RunArguments& arguments, std::vector<std::string>& warnings) {
  const NodeRange nodes = parse_nnodes(arguments.nnodes);
  // Nobody waits for a spare node.
  if (nodes.most == 1 || arguments.spare) return std::nullopt;
  return meeting_options(arguments, nodes, warnings);
}

std::optional<JobMemberOptions> decline_options(const RunArguments& arguments,
                                                const std::string& reason,
                                                int exit_code) {
  JobMemberOptions job;
  try {
    std::vector<std::string> ignored;
    auto meeting = rendezvous_options(arguments, ignored);
    if (!meeting) return std::nullopt;
    job = std::move(*meeting);
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
  job.join_timeout = std::min(job.join_timeout, kMostToTell);
  job.store.timeout = std::min(job.store.timeout, kMostToTell);
  Verdict verdict;
  verdict.kind = Verdict::Kind::declined;
  verdict.exit_code = exit_code;
  verdict.text = job.node.host + ": " + reason;
  if (job.node.node_rank) {
    verdict.node_rank = *job.node.node_rank;
    verdict.text = "node " + std::to_string(verdict.node_rank) + " (" +
                   job.node.host + "): " + reason;
  }
  job.declines = verdict;
  return job;
}

}  // namespace lockstep::internal

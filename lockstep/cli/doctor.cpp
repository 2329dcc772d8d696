#include "lockstep/cli/subcommands.h"

#include <chrono>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/gpu_checks.h"
#include "lockstep/cli/doctor/host_checks.h"
#include "lockstep/cli/doctor/network_checks.h"
#include "lockstep/cli/doctor/nodes/examine_nodes.h"
#include "lockstep/cli/doctor/program_checks.h"
#include "lockstep/cli/run_arguments.h"
#include "lockstep/cli/run_options.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/launch/process/visible_gpus.h"
#include "lockstep/worker/own_address.h"

namespace lockstep::internal {
namespace {

constexpr const char* kDoctorName = "lockstep doctor";
// Programs that link LibTorch start in less than a second, but from a cold
// network file system they may take long.
constexpr std::chrono::seconds kProgramTime{60};
// People wait for it, and nodes that a scheduler starts do not come at once.
constexpr const char* kJoinTimeout = "60";

void tell_user(const std::string& text) { write_message(kDoctorName, text); }

// Keeps what the checks find, and prints each at once if people read it.
class Findings {
 public:
  explicit Findings(bool as_json) : as_json_(as_json) {}
  template <typename Check>
  void add(const std::string& name, const Check& check) {
    for (auto& finding : findings_of(name, check)) {
      if (!as_json_) std::cout << finding_text(finding) << std::flush;
      all_.push_back(std::move(finding));
    }
  }
  const std::vector<Finding>& all() const { return all_; }
  int finish() const {
    std::cout << (as_json_ ? findings_json(all_) : "\n" + summary_text(all_))
              << std::flush;
    return worst_of(all_) == Health::fail ? kSystemError : 0;
  }

 private:
  bool as_json_;
  std::vector<Finding> all_;
};

// Returns nothing if the program is missing.
std::optional<CapturedProgram> ask(const std::string& program,
                                   const std::vector<std::string>& arguments) {
  const auto path = find_libexec(program);
  if (!path) return std::nullopt;
  try {
    return run_captured(*path, arguments, kProgramTime);
  } catch (const std::exception& error) {
    return CapturedProgram{.exit_code = 126, .err = error.what()};
  }
}

// Returns where a job would meet, as far as it is given.
std::vector<Endpoint> given_endpoints(
    const RunArguments& arguments,
    const std::optional<JobMemberOptions>& meeting) {
  if (meeting) {
    std::vector<Endpoint> all = meeting->further_endpoints;
    all.insert(all.begin(), meeting->store.endpoint);
    return all;
  }
  if (!arguments.rdzv_endpoint.empty()) {
    const int port =
        arguments.master_port.empty()
            ? 29500
            : static_cast<int>(
                  parse_int("--master-port", arguments.master_port, 0, 65535));
    return {parse_endpoint("--rdzv-endpoint", arguments.rdzv_endpoint, port)};
  }
  const auto or_variable = [](const std::string& given, const char* name) {
    return given.empty() ? stripped(get_env(name).value_or("")) : given;
  };
  const std::string port = or_variable(arguments.master_port, "MASTER_PORT");
  if (port.empty()) return {};
  const std::string host = or_variable(arguments.master_addr, "MASTER_ADDR");
  return {{host.empty() ? "127.0.0.1" : host,
           static_cast<int>(parse_int("MASTER_PORT", port, 0, 65535))}};
}

// `meeting`: where to meet the other nodes, if there are several.
int examine(bool as_json, const std::optional<JobMemberOptions>& meeting,
            const std::vector<Endpoint>& endpoints) {
  const MachineRoots roots;
  Findings findings(as_json);
  findings.add("cores", [&] { return check_cores(roots); });
  findings.add("memory", [&] { return check_memory(roots); });
  findings.add("NUMA", [&] { return check_numa(roots); });
  findings.add("huge pages", [&] { return check_huge_pages(roots); });
  findings.add("shared memory", [] { return check_shared_memory(); });
  findings.add("/dev/shm", [&] { return check_dev_shm(roots); });
  findings.add("TMPDIR", [] { return check_temporary_files(); });
  findings.add("limits", [&] { return check_limits(roots); });
  findings.add("GPUs", [&] { return check_gpus(roots, ask_nvml()); });
  const auto gpus = [&] { return lockstep::visible_gpus(roots.dev); };
  findings.add("LibTorch",
               [&] { return check_libtorch(ask(kTorchProgram, {}), gpus()); });
  const auto interfaces = [&] { return network_interfaces(roots); };
  findings.add("network", [&] { return check_interfaces(interfaces()); });
  findings.add("nonlocal bind", [&] { return check_nonlocal_bind(roots); });
  for (const Endpoint& endpoint : endpoints) {
    findings.add("endpoint", [&] {
      return check_endpoint(endpoint, /*others=*/meeting.has_value());
    });
  }
  findings.add("Gloo", [&] {
    return check_gloo(interfaces(), own_address(/*one_host=*/true),
                      own_address(/*one_host=*/false), get_env("MASTER_ADDR"));
  });
  findings.add("NCCL", [&] {
    return check_nccl(interfaces(), get_env("NCCL_SOCKET_IFNAME"), gpus());
  });
  findings.add("clock", [] { return check_clock(read_clock()); });
  findings.add("all_reduce", [] {
    return check_all_reduce(ask(kAllReduceProgram, all_reduce_arguments()));
  });
  if (meeting) {
    findings.add("nodes", [&] {
      return examine_nodes(*meeting, findings.all(), tell_user);
    });
  }
  return findings.finish();
}

int examine_or_explain(bool as_json, RunArguments arguments) {
  try {
    strip_numbers(arguments);
    // Later values count.
    arguments.rdzv_conf =
        "join_timeout=" + std::string(kJoinTimeout) +
        (arguments.rdzv_conf.empty() ? "" : "," + arguments.rdzv_conf);
    std::vector<std::string> warnings;
    const auto meeting = rendezvous_options(arguments, warnings);
    if (meeting && meeting->node.elastic()) {
      throw std::invalid_argument(
          "--nnodes is \"" + arguments.nnodes +
          "\"; give the number of nodes on which this command is started");
    }
    for (const auto& warning : warnings) tell_user(warning);
    return examine(as_json, meeting, given_endpoints(arguments, meeting));
  } catch (const std::invalid_argument& error) {
    tell_user(error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    tell_user(error.what());
    return kSystemError;
  }
}

}  // namespace

void add_doctor_command(CLI::App& app, int& exit_code) {
  CLI::App* doctor = add_command(
      app, "doctor", "Say what a job would find missing or slow on this host",
      "lockstep doctor [--json] [--nnodes N --rdzv-endpoint HOST[:PORT]]\n"
      "  Looks at this host as a job would: cores, memory, limits, GPUs, "
      "LibTorch,\n  network, clock, and an all-reduce of two ranks. Takes some "
      "seconds. Each line\n  says what was found and, below, what to do.\n"
      "    ok    nothing has to be done\n"
      "    warn  jobs run, but slower, or not all kinds of them\n"
      "    fail  jobs cannot run, or stop with an error\n"
      "  With --nnodes it is started on every node, as lockstep run is. The "
      "nodes meet,\n  measure the links between them, and the first one shows "
      "what is wrong.\n"
      "  Set the variables that a job has, such as MASTER_ADDR and "
      "GLOO_SOCKET_IFNAME, to\n  see what follows from them.\n"
      "Examples:\n"
      "  lockstep doctor\n"
      "  lockstep doctor --json\n"
      "  lockstep doctor --nnodes 2 --rdzv-endpoint node0 --rdzv-secret-file "
      "~/secret\n"
      "  srun --ntasks-per-node=1 lockstep doctor\n"
      "Exit code 0: nothing fails; 1: something does, here or on another "
      "node; 2: the\noptions are wrong.");
  auto as_json = std::make_shared<bool>(false);
  doctor->add_flag("--json", *as_json, "Print one JSON document");
  auto arguments = std::make_shared<RunArguments>();
  add_meeting_arguments(*doctor, *arguments,
                        {.nnodes = "Nodes: this command on each of them [1]",
                         .join_timeout = kJoinTimeout});
  doctor->callback([as_json, arguments, &exit_code] {
    exit_code = examine_or_explain(*as_json, *arguments);
  });
}

}  // namespace lockstep::internal

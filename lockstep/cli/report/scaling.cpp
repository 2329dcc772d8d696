#include "lockstep/cli/subcommands.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/machine.h"
#include "lockstep/cli/report/scaling_cases.h"
#include "lockstep/cli/report/scaling_result.h"
#include "lockstep/cli/report/scaling_run.h"
#include "lockstep/cli/stop_signal.h"
#include "lockstep/cli/text.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/usable_cores.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep::internal {
namespace {

constexpr const char* kScalingName = "lockstep report scaling";
constexpr int64_t kMostProcesses = 4096;
constexpr int64_t kMostRounds = 1000;
constexpr int64_t kMostSeconds = 1'000'000;

struct ScalingArguments {
  std::string nproc;
  std::string rounds = "3";
  std::string target;
  std::string compare;
  // A whole number only: not the 6 of 1e+06, or the 234.5 of 1,234.5.
  std::string rate_pattern =
      R"((?:^|[^-+,.\w])(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?) samples/s)";
  std::string timeout = "3600";
  std::string html;
  bool json = false;
};

// Returns 1 and the others, in ascending order. Without a list they are powers
// of two, because those divide most batches.
std::vector<int> process_counts(const std::string& list) {
  std::vector<int> counts{1};
  if (list.empty()) {
    const int cores = usable_cores();
    for (int nproc = 2; nproc <= cores; nproc *= 2) counts.push_back(nproc);
    return counts;
  }
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    counts.push_back(
        static_cast<int>(parse_int("--nproc", word, 1, kMostProcesses)));
  }
  std::ranges::sort(counts);
  const auto repeated = std::ranges::unique(counts);
  counts.erase(repeated.begin(), repeated.end());
  return counts;
}

std::regex pattern_of(const std::string& text) {
  try {
    std::regex pattern(text);
    if (pattern.mark_count() >= 1) return pattern;
  } catch (const std::regex_error&) {
  }
  throw std::invalid_argument(
      "--rate-pattern=" + text +
      " is not a regular expression (ECMAScript) with a "
      "group for the number, such "
      "as \"([0-9.]+) samples/s\"");
}

// A metric that no process logged cannot meet its target.
void check_target(const std::string& target,
                  const ScalingMeasurement& measurement) {
  if (target.empty()) return;
  const std::string name(MetricTarget::parse(target).name);
  if (measurement.metrics.contains(name)) return;
  std::string logged;
  for (const auto& metric : measurement.metrics) {
    logged += (logged.empty() ? "" : ", ") + metric;
  }
  throw std::invalid_argument(
      "--target=" + target + ": the program logs no metric \"" + name +
      (logged.empty() ? "\"; it must log it with MetricsLogger or SummaryWriter"
                      : "\"; it logs " + logged));
}

std::vector<std::vector<ScalingMeasurement>> measure(
    const std::vector<ScalingCase>& cases, int rounds,
    const ScalingRunOptions& options, const StopSignal& stop) {
  std::vector<std::vector<ScalingMeasurement>> measured(cases.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < cases.size(); ++i) {
      const ScalingMeasurement one = run_case(cases[i], options, stop);
      if (round == 0 && i == 0) check_target(options.target, one);
      write_message(kScalingName,
                    format("round %d of %d, ", round + 1, rounds) +
                        cases[i].label() + " (" +
                        std::string(name_of(cases[i].scaling)) +
                        format("): %.1f samples/s, %.1f s", one.samples_per_s,
                               one.seconds));
      measured[i].push_back(one);
    }
  }
  return measured;
}

// The runs may take long, so a page that cannot be written is refused before.
void check_page(const std::string& path) {
  std::error_code ignored;
  const bool is_new = !std::filesystem::exists(path, ignored);
  if (!std::ofstream(path, std::ios::app)) {
    throw std::invalid_argument("--html=" + path +
                                " cannot be written: " + std::strerror(errno));
  }
  if (is_new) std::filesystem::remove(path, ignored);
}

void write_page(const std::string& path, const ScalingResult& result) {
  std::ofstream out(path);
  out << scaling_page(result) << std::flush;
  if (!out) throw_errno("--html: cannot write " + path);
}

int report_scaling(const ScalingArguments& arguments,
                   std::vector<std::string> command) {
  if (!command.empty() && command.front() == "--") {
    command.erase(command.begin());
  }
  if (command.empty()) {
    throw std::invalid_argument("the program is missing; see " +
                                std::string(kScalingName) + " --help");
  }
  // A program that does not exist is refused before anything runs.
  resolve_program(
      {expand(command.front(), Scaling::weak, ScalingSide::ranks, 1)},
      ProgramKind::by_name);
  ScalingPlan plan{.nproc = process_counts(arguments.nproc),
                   .command = std::move(command),
                   .compare = arguments.compare};
  if (!arguments.target.empty()) MetricTarget::parse(arguments.target);
  const ScalingRunOptions options{
      .target = arguments.target,
      .rate_pattern = pattern_of(arguments.rate_pattern),
      .timeout = std::chrono::seconds(
          parse_int("--timeout", arguments.timeout, 1, kMostSeconds))};
  const int rounds =
      static_cast<int>(parse_int("--rounds", arguments.rounds, 1, kMostRounds));
  const auto cases = cases_of(plan);
  if (!arguments.html.empty()) check_page(arguments.html);
  ScalingResult result{.command = joined(plan.command),
                       .compare = plan.compare,
                       .target = arguments.target,
                       .rounds = rounds,
                       .machine = machine_facts(),
                       .date = utc_date(),
                       .lockstep = LOCKSTEP_VERSION,
                       .torch = LOCKSTEP_TORCH_VERSION,
                       .tables = {}};
  if (const std::string busy = load_warning(result.machine); !busy.empty()) {
    write_message(kScalingName, "warning: " + busy);
  }
  const StopSignal stop;
  // Children are waited for (descendants.h), also if this process was started
  // with the signal ignored.
  std::signal(SIGCHLD, SIG_DFL);
  sigset_t ended;
  sigemptyset(&ended);
  sigaddset(&ended, SIGCHLD);
  sigprocmask(SIG_BLOCK, &ended, nullptr);
  result.tables = make_tables(cases, measure(cases, rounds, options, stop));
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  std::cout << (arguments.json
                    ? scaling_json(result).dump(2, ' ', false, kReplace) + "\n"
                    : scaling_text(result))
            << std::flush;
  if (!arguments.html.empty()) {
    write_page(arguments.html, result);
    write_message(kScalingName, "the page is " + arguments.html);
  }
  return 0;
}

int report_or_explain(const ScalingArguments& arguments,
                      std::vector<std::string> command) {
  try {
    return report_scaling(arguments, std::move(command));
  } catch (const Interrupted& interrupted) {
    return 128 + interrupted.signal();
  } catch (const ProgramError& error) {
    write_message(kScalingName, error.what());
    return error.exit_code();
  } catch (const std::invalid_argument& error) {
    write_message(kScalingName, error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    write_message(kScalingName, error.what());
    return kSystemError;
  }
}

}  // namespace

void add_scaling_command(CLI::App& report, CLI::App& app, int& exit_code) {
  CLI::App* scaling = add_command(
      report, "scaling",
      "Say how much faster a program trains with more processes",
      "lockstep report scaling [OPTIONS] -- PROGRAM [ARGUMENTS...]\n"
      "  Runs PROGRAM with each number of processes, and in one process with "
      "as "
      "many\n  threads. In ARGUMENTS, {batch:64} stands for the samples of a "
      "process in a step,\n  {global_batch:64} for those of all, and {nproc} "
      "for "
      "the number of processes.\n"
      "Examples:\n"
      "  lockstep report scaling -- ./train --epochs 2\n"
      "  lockstep report scaling --nproc 1,2,4 --html scaling.html -- \\\n"
      "      ./train --batch-size {batch:64}\n"
      "  lockstep report scaling --target 'loss<=0.3' --compare 'torchrun \\\n"
      "      --nproc-per-node={nproc} train.py --batch-size {batch:64}' -- \\\n"
      "      ./train --batch-size {batch:64}\n"
      "Exit code 0: the report was printed; 1: a run failed; 2: wrong "
      "arguments.");
  auto arguments = std::make_shared<ScalingArguments>();
  scaling
      ->add_option("--nproc", arguments->nproc,
                   "Numbers of processes; 1 is always one of them (default: 1, "
                   "2, 4 and so on, up to the cores)")
      ->type_name("LIST");
  scaling
      ->add_option("--rounds", arguments->rounds,
                   "How often everything runs, in turns (default: 3)")
      ->type_name("N");
  scaling
      ->add_option("--target", arguments->target,
                   "Say how long the training takes until a metric that it "
                   "logs meets this target: loss<=0.3")
      ->type_name("METRIC<=VALUE");
  scaling
      ->add_option("--compare", arguments->compare,
                   "A command that a shell runs beside it, for example with "
                   "torchrun")
      ->type_name("COMMAND");
  scaling
      ->add_option("--rate-pattern", arguments->rate_pattern,
                   "Finds the samples per second in what a program prints that "
                   "is not one of Lockstep (default: a number before "
                   "\" samples/s\")")
      ->type_name("REGEX");
  scaling
      ->add_option("--timeout", arguments->timeout,
                   "How long one run may take (default: 3600)")
      ->type_name("SECONDS");
  scaling
      ->add_option("--html", arguments->html,
                   "Write a page with the tables and pictures, too")
      ->type_name("FILE");
  scaling->add_flag("--json", arguments->json, "Print one JSON document");
  // Everything from the program on belongs to it. After "--" CLI11 leaves that
  // with the parents, which take it for this command only.
  scaling->prefix_command();
  scaling->preparse_callback([&report](size_t) { report.allow_extras(); });
  scaling->callback([scaling, &report, &app, arguments, &exit_code] {
    auto command = scaling->remaining();
    if (command.empty()) command = report.remaining();
    if (command.empty()) command = app.remaining();
    exit_code = report_or_explain(*arguments, std::move(command));
  });
}

}  // namespace lockstep::internal

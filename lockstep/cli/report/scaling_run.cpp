#include "lockstep/cli/report/scaling_run.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/launch/process/descendants.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/run_directory.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;

// `lockstep run` gives its workers 30 s to end after a signal.
constexpr milliseconds kEndAllowance{40'000};
constexpr milliseconds kLeftoverGrace{200};
constexpr milliseconds kPollInterval{20};
constexpr size_t kLastLines = 15;

// A temporary folder that is removed at the end.
class RunFolder {
 public:
  RunFolder() {
    std::string name =
        (find_temporary_place().folder / "lockstep_scaling_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw_errno("mkdtemp " + name);
    path_ = name;
  }
  ~RunFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Ends what a command has left running: a shell ends before what it started.
class LeftoverEnd {
 public:
  LeftoverEnd() { adopt_orphans(); }
  ~LeftoverEnd() {
    end_descendants(kLeftoverGrace, [](pid_t, int) {});
  }
  LeftoverEnd(const LeftoverEnd&) = delete;
  LeftoverEnd& operator=(const LeftoverEnd&) = delete;
};

// Returns this process's environment with `changes`, each of the form
// NAME=value.
std::vector<std::string> environment_with(std::vector<std::string> changes) {
  std::vector<std::string> all = current_environment();
  std::erase_if(all, [&](const std::string& entry) {
    const std::string name = entry.substr(0, entry.find('=') + 1);
    return std::ranges::any_of(changes, [&](const std::string& change) {
      return change.starts_with(name);
    });
  });
  all.insert(all.end(), changes.begin(), changes.end());
  return all;
}

std::vector<std::string> words_of(const ScalingCase& which) {
  if (which.side == ScalingSide::compared) return which.command;
  std::vector<std::string> words{
      "/proc/self/exe", "run", "--standalone",
      "--nproc-per-node=" + std::to_string(which.processes()), "--"};
  words.insert(words.end(), which.command.begin(), which.command.end());
  return words;
}

std::string last_lines(const fs::path& file) {
  std::ifstream in(file);
  std::deque<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
    if (lines.size() > kLastLines) lines.pop_front();
  }
  std::string text;
  for (const auto& line : lines) text += "\n  " + line;
  return text.empty() ? "; it printed nothing"
                      : "; the end of its output:" + text;
}

// Waits until `child` has ended. Throws Interrupted, after the child has ended,
// and ScalingError at the deadline.
void await(ChildProcess& child, const ScalingRunOptions& options,
           const StopSignal& stop) {
  const auto end_it = [&] {
    child.signal_group(SIGTERM);
    const Deadline deadline = Deadline::after(kEndAllowance);
    while (!child.reap() && !deadline.expired()) {
      poll(nullptr, 0, static_cast<int>(kPollInterval.count()));
    }
  };
  const Deadline deadline = Deadline::after(options.timeout);
  while (!child.reap()) {
    try {
      stop.check();
    } catch (const Interrupted&) {
      end_it();
      throw;
    }
    if (deadline.expired()) {
      end_it();
      throw ScalingError("did not end within " +
                         std::to_string(options.timeout.count() / 1000) +
                         " s; see --timeout");
    }
    pollfd entries[] = {{stop.fd(), POLLIN, 0}, {child.pidfd(), POLLIN, 0}};
    // Without pidfds, the child is looked at now and then.
    const auto longest =
        child.pidfd() < 0 ? kPollInterval : deadline.remaining();
    poll(entries, 2,
         static_cast<int>(std::min<int64_t>(longest.count(), INT_MAX)));
  }
}

// Adds what the processes wrote. Returns whether all of them did.
bool read_summaries(const ScalingCase& which, const fs::path& folder,
                    ScalingMeasurement& result) {
  for (int rank = 0; rank < which.processes(); ++rank) {
    std::ifstream in(folder / ("rank-" + std::to_string(rank) + ".json"));
    const json summary = json::parse(in, nullptr, false);
    if (!summary.is_object() || !summary["samples_per_s"].is_number()) {
      return false;
    }
    result.samples_per_s += summary["samples_per_s"].get<double>();
    for (const auto& [name, value] : summary["metrics"].items()) {
      result.metrics.insert(name);
    }
    if (summary["target_s"].is_number()) {
      result.target_s = std::max(result.target_s.value_or(0),
                                 summary["target_s"].get<double>());
    }
  }
  return true;
}

// Returns what the pattern finds in the output, or 0.
double printed_rate(const fs::path& output, const std::regex& pattern) {
  std::ifstream in(output);
  double rate = 0;
  for (std::string line; std::getline(in, line);) {
    // std::regex takes a stack frame for each character.
    if (line.size() > 4096) continue;
    for (std::sregex_iterator match(line.begin(), line.end(), pattern), end;
         match != end; ++match) {
      rate = std::strtod((*match)[1].str().c_str(), nullptr);
    }
  }
  return rate;
}

}  // namespace

ScalingMeasurement run_case(const ScalingCase& which,
                            const ScalingRunOptions& options,
                            const StopSignal& stop) {
  const RunFolder folder;
  const LeftoverEnd leftovers;
  const fs::path output = folder.path() / "output.log";
  const FileDescriptor in = above_standard_streams(
      FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)));
  const FileDescriptor out = above_standard_streams(FileDescriptor(
      open(output.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND, 0600)));
  if (!out) throw_errno("open " + output.string());
  std::vector<std::string> changes{
      "OMP_NUM_THREADS=" +
          std::to_string(which.side == ScalingSide::threads ? which.nproc : 1),
      "LOCKSTEP_TRAINING_SUMMARY=" + folder.path().string()};
  if (!options.target.empty()) {
    changes.push_back("LOCKSTEP_TRAINING_TARGET=" + options.target);
  }
  const auto words = words_of(which);
  const auto environment = environment_with(changes);
  ChildProcess child =
      start_program({.what = "starting " + which.label(),
                     .path = words.front(),
                     .arguments = words,
                     .environment = environment,
                     .stdin_fd = in.get(),
                     .stdout_fd = out.get(),
                     .stderr_fd = out.get(),
                     .surroundings = {.signal_mask = stop.original_mask()}});
  const std::string name =
      which.label() + " (" + std::string(name_of(which.scaling)) + ")";
  try {
    await(child, options, stop);
  } catch (const ScalingError& error) {
    throw ScalingError(name + " " + error.what() + last_lines(output));
  }
  if (child.exit_code() != 0) {
    throw ScalingError(name + " ended with exit code " +
                       std::to_string(child.exit_code()) + last_lines(output));
  }
  ScalingMeasurement result;
  if (!read_summaries(which, folder.path(), result)) {
    result.samples_per_s = printed_rate(output, options.rate_pattern);
  }
  if (!(result.samples_per_s > 0)) {
    throw ScalingError(
        name +
        " said nothing about samples: a program of Lockstep needs a "
        "lockstep::DataLoader and two batches on each rank, another one prints "
        "its samples per second (--rate-pattern)" +
        last_lines(output));
  }
  result.seconds = static_cast<double>(child.lifetime().count()) / 1000;
  return result;
}

}  // namespace lockstep::internal

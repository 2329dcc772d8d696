#include "lockstep/cli/jobs/profile.h"

#include <signal.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/left_file.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/job_argument.h"
#include "lockstep/cli/jobs/job_view.h"
#include "lockstep/cli/report/trace_file_error.h"
#include "lockstep/cli/report/trace_folder.h"
#include "lockstep/cli/report/trace_report.h"
#include "lockstep/cli/stop_signal.h"
#include "lockstep/launch/exit_code.h"
#include "lockstep/launch/job_link.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr const char* kProfileName = "lockstep profile";
constexpr milliseconds kLookInterval{200};
// How long the ranks take at most to hear of a profile, mostly.
constexpr double kHearingSeconds = 0.2;

struct ProfileArguments {
  std::string job;
  double seconds = 5;
  double wait = 60;
  std::string output;
};

milliseconds time_of(const char* option, double seconds) {
  if (!(seconds > 0) || seconds > 86'400) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", seconds);
    throw std::invalid_argument(std::string(option) + " is " + text +
                                "; allowed is more than 0, up to 86400");
  }
  return milliseconds(static_cast<int64_t>(std::ceil(1000 * seconds)));
}

// Makes the folder, or throws std::invalid_argument if it holds anything.
void make_empty_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw std::invalid_argument("cannot make --output " + folder.string() +
                                ": " + error.message());
  }
  if (!fs::is_empty(folder, error) || error) {
    throw std::invalid_argument("--output " + folder.string() +
                                " is not an empty folder; name another");
  }
}

// The traces that the ranks of one job write for one profile.
struct RanksTraces {
  JobOwner owner;
  fs::path attempt;    // the folder of the attempt
  std::string folder;  // its folder for this profile
};

// Moves the trace that a rank names to the folder `to`. Returns its new path;
// an empty one if it could not. Nothing else can be moved so: the rank may be
// another user's, and this process root's.
fs::path take_trace(const RanksTraces& traces, const fs::path& named,
                    const fs::path& to) {
  const fs::path name = fs::path(traces.folder) / named.filename();
  if (named != traces.attempt / name) return {};
  FileDescriptor from;
  {
    const OwnersRights rights(traces.owner);
    from = open_left_file(traces.attempt, name);
  }
  struct stat facts {};
  if (!from || ::fstat(from.get(), &facts) != 0) return {};
  const fs::path copy = to / shown_line(named.filename().string());
  const FileDescriptor into = make_own_file(copy);
  // Bytes that a rank adds from now on are left out.
  off_t left = facts.st_size;
  while (into && left > 0) {
    const ssize_t count =
        ::sendfile(into.get(), from.get(), nullptr, static_cast<size_t>(left));
    if (count <= 0) break;
    left -= count;
  }
  std::error_code ignored;
  if (!into || left > 0) {  // the disk is full
    fs::remove(copy, ignored);
    return {};
  }
  const OwnersRights rights(traces.owner);
  fs::remove(traces.attempt / name, ignored);
  return copy;
}

// Replaces a trace by a compressed file. If that fails, leaves it as it is.
void compress(const fs::path& file) {
  const std::string compressed = file.string() + ".gz";
  std::ifstream in(file, std::ios::binary);
  gzFile out = gzopen(compressed.c_str(), "wb3");
  bool is_whole = out != nullptr && in;
  std::array<char, 1 << 16> piece;
  while (is_whole && in.read(piece.data(), piece.size()).gcount() > 0) {
    const auto count = static_cast<int>(in.gcount());
    is_whole =
        gzwrite(out, piece.data(), static_cast<unsigned>(count)) == count;
  }
  if (out != nullptr) is_whole = gzclose(out) == Z_OK && is_whole;
  std::error_code ignored;
  fs::remove(is_whole && in.eof() ? file : fs::path(compressed), ignored);
}

// What became of one rank's profile.
struct Outcome {
  int rank;
  ProfileState state;
  std::string words;  // the file that it wrote, or why there is none
};

// Returns the outcome of a worker; nothing if it may still change. `last` is
// the number of the last profile that was asked for.
std::optional<Outcome> outcome_of(const WorkerStatus& worker,
                                  const std::optional<RankStatus>& rank,
                                  int64_t number, int64_t last, bool late) {
  const auto failed = [&](std::string why) {
    return Outcome{worker.rank, ProfileState::failed, std::move(why)};
  };
  if (rank && rank->profile == number &&
      (rank->profile_state == ProfileState::written ||
       rank->profile_state == ProfileState::failed)) {
    return Outcome{worker.rank, rank->profile_state,
                   std::string(rank->profile_words.view())};
  }
  if (worker.exit_code) return failed("it has ended");
  if (last != number) {
    return failed("another lockstep profile of this job took its place");
  }
  if (!late) return std::nullopt;
  if (!rank) {
    return failed(
        "it says nothing; it may be no program of Lockstep, or not have called "
        "init_process_group()");
  }
  if (rank->profile != number) return failed("it does not answer");
  if (rank->profile_state == ProfileState::waiting) {
    return failed("it made no step; lockstep stacks shows where it is");
  }
  return failed("it was restarted, or did not finish in time");
}

// Waits for the outcomes of all ranks. A signal ends the profile, and this
// waits on until the ranks have written what they have; throws Interrupted at
// another.
std::vector<Outcome> await_outcomes(JobLink& link, int64_t number,
                                    milliseconds duration, milliseconds wait,
                                    const StopSignal& stop) {
  Deadline deadline = Deadline::after(duration + wait);
  bool is_stopped = false;
  while (true) {
    try {
      stop.check();
    } catch (const Interrupted&) {
      if (is_stopped) throw;
      is_stopped = true;
      write_message(kProfileName,
                    "the ranks write what they have recorded; a second signal "
                    "ends this at once");
      link.stop_profile(number);
      deadline = Deadline::after(wait);
    }
    const JobStatus status = link.watch();
    std::vector<Outcome> outcomes;
    for (const WorkerStatus& worker : status.workers) {
      const auto rank = link.board().read(worker.local_rank);
      const bool late = deadline.expired() || (is_stopped && !rank);
      auto outcome = outcome_of(worker, rank, number,
                                link.board().last_profile().number, late);
      if (outcome) outcomes.push_back(std::move(*outcome));
    }
    if (outcomes.size() == status.workers.size()) return outcomes;
    std::this_thread::sleep_for(kLookInterval);
  }
}

// Returns a step that no rank has reached when it hears of the profile.
int64_t first_step(const JobView& view) {
  int64_t step = 0;
  for (const WorkerView& worker : view.workers) {
    if (!worker.steps) continue;
    const double soon =
        kHearingSeconds * worker.steps_per_second.value_or(0) + 1;
    step = std::max(step, *worker.steps + static_cast<int64_t>(soon));
  }
  return step;
}

// Throws if a rank records a profile for somebody else: it would go on with it.
void require_no_recording(JobLink& link, const JobStatus& status) {
  for (const WorkerStatus& worker : status.workers) {
    const auto rank = link.board().read(worker.local_rank);
    if (!rank || rank->profile_state != ProfileState::recording) continue;
    throw std::runtime_error(
        "rank " + std::to_string(worker.rank) +
        " records a profile already, for another lockstep profile; try again "
        "after that one has ended");
  }
}

int profile(const ProfileArguments& arguments) {
  const StopSignal stop;
  const milliseconds duration = time_of("--seconds", arguments.seconds);
  const milliseconds wait = time_of("--wait", arguments.wait);
  JobLink link(find_job(job_argument(arguments.job)), /*keeps_root=*/true);
  const JobMoment before = look_at(link);
  std::this_thread::sleep_for(kLookInterval);
  const JobView now = view_of(before, look_at(link));
  require_no_recording(link, now.status);
  fs::path folder = arguments.output;
  if (folder.empty()) {
    folder = "lockstep-profile-" + std::to_string(now.status.agent_pid) + "-" +
             std::to_string(std::time(nullptr));
  }
  make_empty_folder(folder);
  const int64_t number = link.ask_profile(duration, first_step(now));
  std::vector<Outcome> outcomes;
  try {
    outcomes = await_outcomes(link, number, duration, wait, stop);
  } catch (...) {
    std::error_code ignored;
    fs::remove(folder, ignored);  // it is empty
    throw;
  }
  // From here on a signal may end the command as it likes.
  sigprocmask(SIG_SETMASK, &stop.original_mask(), nullptr);
  bool all = true;
  size_t written = 0;
  const RanksTraces made{link.owner(), now.status.attempt_directory,
                         "profile" + std::to_string(number)};
  for (const Outcome& outcome : outcomes) {
    if (outcome.state != ProfileState::written) {
      all = false;
      write_message(kProfileName, "rank " + std::to_string(outcome.rank) +
                                      " wrote no trace: " + outcome.words);
    } else if (const fs::path trace = take_trace(made, outcome.words, folder);
               !trace.empty()) {
      compress(trace);
      ++written;
    } else {
      all = false;
      write_message(kProfileName, "the trace of rank " +
                                      std::to_string(outcome.rank) +
                                      " cannot be taken: " + outcome.words);
    }
  }
  std::error_code ignored;
  {
    const OwnersRights rights(made.owner);
    fs::remove(made.attempt / made.folder, ignored);
  }
  if (written == 0) {
    fs::remove(folder, ignored);
    return kSystemError;
  }
  const TraceFolder traces = read_trace_folder(folder.string());
  const TraceReport report = make_trace_report(traces);
  for (const auto& warning : report.warnings) {
    write_message(kProfileName, "warning: " + warning);
  }
  write_output(trace_table(report) + "\nThe traces are in " + folder.string() +
               "; ui.perfetto.dev shows one, and lockstep report trace merges "
               "them.\n");
  return all ? 0 : kSystemError;
}

int profile_or_explain(const ProfileArguments& arguments) {
  try {
    return profile(arguments);
  } catch (const Interrupted& interrupted) {
    return 128 + interrupted.signal();
  } catch (const std::invalid_argument& error) {
    write_message(kProfileName, error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    write_message(kProfileName, error.what());
    return kSystemError;
  }
}

}  // namespace

void add_profile_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "profile", "Record what a running job does, and say where time goes");
  command->formatter(make_help_formatter(
      "lockstep profile [--seconds S] [--output DIR] [JOB]\n"
      "  Each rank on this host records whole steps for S seconds, from its "
      "next step on,\n  and writes a trace; Ctrl-C ends that early and keeps "
      "what "
      "there is. JOB is a run id, or the process id "
      "of a lockstep run; without\n  it, the only job.\n"
      "Examples:\n"
      "  lockstep profile\n"
      "  lockstep profile 4711 --seconds 2 --output traces\n"
      "Exit code 0: all ranks wrote a trace; 1: a rank did not; 2: there is no "
      "such job."));
  command->get_help_ptr()->description("Print this help and exit");
  auto arguments = std::make_shared<ProfileArguments>();
  add_job_argument(*command, arguments->job);
  command
      ->add_option("--seconds", arguments->seconds,
                   "How long the ranks record (default: 5)")
      ->type_name("S");
  command
      ->add_option("--output", arguments->output,
                   "The folder for the traces, new or empty (default: "
                   "lockstep-profile-PID-TIME here)")
      ->type_name("DIR");
  command
      ->add_option("--wait", arguments->wait,
                   "How long a rank may take for its next step and for writing "
                   "(default: 60)")
      ->type_name("S");
  command->callback(
      [arguments, &exit_code] { exit_code = profile_or_explain(*arguments); });
}

}  // namespace lockstep::internal

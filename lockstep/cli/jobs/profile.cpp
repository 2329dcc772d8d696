#include "lockstep/cli/subcommands.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/job_view.h"
#include "lockstep/cli/jobs/jobs.h"
#include "lockstep/cli/report/trace_folder.h"
#include "lockstep/cli/report/trace_report.h"
#include "lockstep/cli/report/trace_scan.h"
#include "lockstep/cli/stop_signal.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/launch/watch/job_link.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr const char* kProfileName = "lockstep profile";
constexpr milliseconds kLookInterval{200};
// How long the ranks take at most to hear of a profile, mostly.
constexpr double kHearingSeconds = 0.2;
// A rank may be another user's, and must not fill the disk.
constexpr off_t kMostTraceBytes = off_t{4} << 30;

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

// The folder for the traces. It is used by its descriptor: where it lies, other
// users may be able to put another folder or a link in its place.
class OutputFolder {
 public:
  // Makes the folder, or takes an empty one that is this user's and that nobody
  // else may write. Throws std::invalid_argument.
  explicit OutputFolder(fs::path name) : name_(std::move(name)) {
    const auto refuse = [&](const std::string& why) {
      throw std::invalid_argument("--output " + name_.string() + why);
    };
    std::error_code error;
    if (name_.has_parent_path()) {
      fs::create_directories(name_.parent_path(), error);
    }
    if (!error && ::mkdir(name_.c_str(), 0755) != 0 && errno != EEXIST) {
      error.assign(errno, std::generic_category());
    }
    if (error) refuse(" cannot be made: " + error.message());
    constexpr int kFolder = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    open_ = FileDescriptor(::open(name_.c_str(), kFolder));
    struct stat facts {};
    if (!open_ || ::fstat(open_.get(), &facts) != 0 ||
        !fs::is_empty(path(), error) || error) {
      refuse(" is not an empty folder, or it is a link; name another");
    }
    // A user's own group often has the user alone.
    const mode_t others =
        facts.st_gid == ::getegid() ? S_IWOTH : S_IWGRP | S_IWOTH;
    if (facts.st_uid != ::geteuid() || (facts.st_mode & others) != 0) {
      refuse(
          " is another user's, or others may write to it; name a new folder");
    }
  }

  const fs::path& name() const { return name_; }
  // Returns its path for this process.
  fs::path path() const {
    return "/proc/self/fd/" + std::to_string(open_.get());
  }
  // Returns `text` with name() in the place of path().
  std::string shown(std::string text) const {
    const std::string own = path().string();
    for (size_t at = 0; (at = text.find(own, at)) != text.npos;) {
      text.replace(at, own.size(), name_.string());
      at += name_.string().size();
    }
    return text;
  }
  void remove_if_empty() const { ::rmdir(name_.c_str()); }

 private:
  fs::path name_;
  FileDescriptor open_{};
};

// The traces that the ranks of one job write for one profile.
struct RanksTraces {
  JobOwner owner;
  fs::path attempt;    // the folder of the attempt
  std::string folder;  // its folder for this profile
};

// Compresses the next `bytes` bytes of `from`. Returns whether it has written
// all of them.
bool compress(const FileDescriptor& from, off_t bytes, FileDescriptor into) {
  gzFile out = into ? gzdopen(into.get(), "wb3") : nullptr;
  if (out == nullptr) return false;
  into.release();  // gzclose() closes it
  std::array<char, 1 << 16> piece;
  while (bytes > 0) {
    const auto most = std::min<off_t>(bytes, std::ssize(piece));
    const ssize_t count =
        ::read(from.get(), piece.data(), static_cast<size_t>(most));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0 ||
        gzwrite(out, piece.data(), static_cast<unsigned>(count)) != count) {
      break;
    }
    bytes -= count;
  }
  return gzclose(out) == Z_OK && bytes == 0;
}

// Moves the trace that a rank names, of those in its attempt's folder, to the
// folder `to`, compressed. Returns why it could not; an empty text if it has.
// Nothing else can be moved so: the rank may be another user's, and this
// process root's.
std::string take_trace(const RanksTraces& traces, const fs::path& named,
                       const fs::path& to) {
  const fs::path name = fs::path(traces.folder) / named.filename();
  const std::string shown = (traces.attempt / name).string();
  FileDescriptor from;
  if (named == named.filename()) {
    const OwnersRights rights(traces.owner);
    from = open_left_file(traces.attempt, name);
  }
  struct stat facts {};
  if (!from || ::fstat(from.get(), &facts) != 0) return shown;
  if (facts.st_size > kMostTraceBytes) {
    return shown + " has " + std::to_string(facts.st_size) +
           " bytes, and at most " + std::to_string(kMostTraceBytes) +
           " are taken; record for fewer --seconds";
  }
  const fs::path taken = to / (shown_line(named.filename().string()) + ".gz");
  std::error_code ignored;
  // Bytes that a rank adds from now on are left out.
  if (!compress(from, facts.st_size, make_own_file(taken))) {
    fs::remove(taken, ignored);
    return shown + " cannot be copied; the disk may be full";
  }
  const OwnersRights rights(traces.owner);
  fs::remove(traces.attempt / name, ignored);
  return {};
}

// The outcome of one rank's profile.
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
        "it says nothing; it may not be a program of Lockstep, or not have "
        "called init_process_group()");
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
    size_t ranks = 0;
    for (const WorkerStatus& worker : status.workers) {
      if (worker.rank < 0) continue;
      ++ranks;
      const auto rank = link.board().read(worker.local_rank);
      const bool late = deadline.expired() || (is_stopped && !rank);
      auto outcome = outcome_of(worker, rank, number,
                                link.board().last_profile().number, late);
      if (outcome) outcomes.push_back(std::move(*outcome));
    }
    if (outcomes.size() == ranks) return outcomes;
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

// Returns where the time goes in the traces of the folder, and prints what is
// odd in them.
std::string report_of(const OutputFolder& folder) {
  try {
    const TraceFolder traces = read_trace_folder(folder.path().string());
    TraceReport report = make_trace_report(traces);
    report.folder = folder.name().string();
    for (const auto& warning : report.warnings) {
      write_message(kProfileName, "warning: " + folder.shown(warning));
    }
    return trace_table(report) + "\nThe traces are in " +
           folder.name().string() +
           "; ui.perfetto.dev shows one, and lockstep report trace merges "
           "them.\n";
  } catch (const TraceFileError& error) {
    throw TraceFileError(folder.shown(error.what()));
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
  std::string name = arguments.output;
  if (name.empty()) {
    name = "lockstep-profile-" + std::to_string(now.status.agent_pid) + "-" +
           std::to_string(std::time(nullptr));
  }
  const OutputFolder folder(name);
  const int64_t number = link.ask_profile(duration, first_step(now));
  std::vector<Outcome> outcomes;
  try {
    outcomes = await_outcomes(link, number, duration, wait, stop);
  } catch (...) {
    folder.remove_if_empty();
    throw;
  }
  // From here on a signal may end the command as it likes.
  sigprocmask(SIG_SETMASK, &stop.original_mask(), nullptr);
  size_t written = 0;
  const RanksTraces made{link.owner(), now.status.attempt_directory,
                         "profile" + std::to_string(number)};
  for (const Outcome& outcome : outcomes) {
    const std::string rank = "rank " + std::to_string(outcome.rank);
    if (outcome.state != ProfileState::written) {
      write_message(kProfileName, rank + " wrote no trace: " + outcome.words);
      continue;
    }
    const auto why = take_trace(made, outcome.words, folder.path());
    if (why.empty()) {
      ++written;
    } else {
      write_message(kProfileName,
                    "the trace of " + rank + " cannot be taken: " + why);
    }
  }
  {
    const OwnersRights rights(made.owner);
    std::error_code ignored;
    fs::remove(made.attempt / made.folder, ignored);
  }
  if (written == 0) {
    folder.remove_if_empty();
    return kSystemError;
  }
  write_output(report_of(folder));
  return written == outcomes.size() ? 0 : kSystemError;
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
  CLI::App* command = add_command(
      app, "profile", "Record what a running job does, and say where time goes",
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
      "such job.");
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

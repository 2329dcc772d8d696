#include "lockstep/launch/watch/crash_report.h"

#include <algorithm>
#include <ctime>
#include <deque>
#include <exception>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/shown_text.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/launch/watch/hang_finder.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLogBytes = 16 << 10;
constexpr size_t kLogLines = 30;
// Reports of many ranks that failed alike repeat themselves.
constexpr size_t kMostWorkers = 16;

std::string time_text(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[40];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return text;
}

// Returns the last lines of a file; none if there is no such file.
std::vector<std::string> last_lines(const fs::path& attempt,
                                    const fs::path& name) {
  std::istringstream text(
      read_end_of_left_file(attempt, name, kLogBytes).value_or(""));
  std::deque<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    // As a terminal shows what a progress bar has written over.
    if (line.ends_with('\r')) line.pop_back();
    lines.push_back(line.substr(line.rfind('\r') + 1));
    if (lines.size() > kLogLines) lines.pop_front();
  }
  return {lines.begin(), lines.end()};
}

std::vector<fs::path> flight_records(const fs::path& directory) {
  std::vector<fs::path> records;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end;
       !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with("lockstep-flight-")) {
      records.push_back(entry->path());
    }
  }
  std::ranges::sort(records);
  return records;
}

// Returns what is known of workers that failed alike, in lines, of at most
// `most`; sets `more` if it is more than the launcher's own lines say.
std::string section(const AlikeFailures& failures, size_t most, bool& more) {
  std::string text = summary(failures) + "\n";
  for (const WorkerFailure* failure : failures.all) {
    if (most-- == 0) break;
    text += "  rank " + std::to_string(failure->rank) + " at " +
            time_text(failure->time()) + ", local rank " +
            std::to_string(failure->local_rank) + ", pid " +
            std::to_string(failure->pid) + "\n";
    const std::string rest = details(*failure);
    if (failure == failures.all.front() && !rest.empty()) {
      text += "  " + rest + "\n";
    }
    if (!failure->stack.empty()) {
      more = true;
      text += "  stack of the thread that failed:\n";
      for (const auto& frame : failure->stack) text += "    " + frame + "\n";
    }
    for (const LogTail& log : failure->logs) {
      more = true;
      text += "  the last lines of " + log.file.string() + ":\n";
      for (const auto& line : log.lines) text += "    " + line + "\n";
    }
  }
  return text;
}

}  // namespace

void FailedAttempt::read_files() try {
  for (size_t at = 0; at < std::min(kMostWorkers, failures.size()); ++at) {
    WorkerFailure& failure = failures[at];
    failure.logs.clear();
    for (const char* name : {"stderr.log", "stdout.log"}) {
      const fs::path file = failure.folder / name;
      LogTail log{.file = directory / file,
                  .lines = last_lines(directory, file)};
      if (!log.lines.empty()) failure.logs.push_back(std::move(log));
    }
  }
  flight_records = internal::flight_records(directory);
  std::error_code ignored;
  const auto file = directory / HangFinder::kStacksFile;
  if (fs::exists(file, ignored)) stacks = file;
} catch (const std::exception&) {
  // Out of memory, or a path that is not text.
}

fs::path write_crash_report(const FailedAttempt& attempt) {
  try {
    bool more = false;
    std::string text = "job " + attempt.run_id + " on " + attempt.host +
                       ", restarts used " +
                       std::to_string(attempt.restarts_used) + " of " +
                       std::to_string(attempt.max_restarts) + "\nprogram:";
    for (const auto& word : attempt.program) text += " " + word;
    text += '\n';
    size_t left = kMostWorkers;
    for (const AlikeFailures& failures : alike(attempt.failures)) {
      text += left == kMostWorkers ? "\nfirst, " : "\nthen ";
      text += section(failures, left, more);
      left -= std::min(left, failures.all.size());
    }
    if (!attempt.stacks.empty()) {
      more = true;
      text +=
          "\nwhere all threads of all ranks were: " + attempt.stacks.string() +
          "\n";
    }
    if (!attempt.flight_records.empty()) {
      more = true;
      text += "\nwhat the ranks did last (lockstep inspect flight):\n";
      for (const auto& record : attempt.flight_records) {
        text += "  " + record.string() + "\n";
      }
    }
    if (!more) return {};
    fs::path path = attempt.directory / "crash-report.txt";
    if (write_own_file(path, shown_text(text))) return path;
  } catch (const std::exception&) {
    // Out of memory, or a path that is not text.
  }
  return {};
}

}  // namespace lockstep::internal

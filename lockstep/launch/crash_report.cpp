#include "lockstep/launch/crash_report.h"

#include <algorithm>
#include <ctime>
#include <exception>
#include <fstream>
#include <string_view>

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLogBytes = 16 << 10;
constexpr int kLogLines = 30;
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

// Returns the last lines of a file, indented; empty if there is none.
std::string last_lines(const fs::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {};
  const auto size = static_cast<size_t>(file.tellg());
  const size_t begin = size > kLogBytes ? size - kLogBytes : 0;
  file.seekg(static_cast<std::streamoff>(begin));
  std::string text(size - begin, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!text.empty() && text.back() == '\n') text.pop_back();
  size_t from = text.size();
  for (int line = 0; line < kLogLines && from != std::string::npos; ++line) {
    from = from == 0 ? std::string::npos : text.rfind('\n', from - 1);
  }
  if (from != std::string::npos) text.erase(0, from + 1);
  if (text.empty()) return {};
  for (size_t at = text.find('\n'); at != std::string::npos;
       at = text.find('\n', at + 5)) {
    text.replace(at, 1, "\n    ");
  }
  return "    " + text + "\n";
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

// Returns what is known of one worker, in lines; sets `more` if it is more than
// the launcher's own lines say.
std::string section(const WorkerFailure& failure, const fs::path& directory,
                    bool& more) {
  std::string text = headline(failure) + "\n  at " + time_text(failure.time()) +
                     ", local rank " + std::to_string(failure.local_rank) +
                     ", pid " + std::to_string(failure.pid) + "\n";
  if (!failure.error.message.empty()) {
    text += "  " + failure.error.message + "\n";
  }
  if (!failure.stack.empty()) {
    more = true;
    text += "  stack of the thread that failed:\n";
    for (const auto& frame : failure.stack) text += "    " + frame + "\n";
  }
  const auto worker = directory / std::to_string(failure.local_rank);
  for (const char* name : {"stderr.log", "stdout.log"}) {
    const std::string lines = last_lines(worker / name);
    if (lines.empty()) continue;
    more = true;
    text += "  the last lines of " + (worker / name).string() + ":\n" + lines;
  }
  return text;
}

}  // namespace

std::optional<fs::path> write_crash_report(const FailedAttempt& attempt) {
  try {
    bool more = false;
    std::string text = "job " + attempt.run_id + " on " + attempt.host +
                       ", restarts used " +
                       std::to_string(attempt.restarts_used) + " of " +
                       std::to_string(attempt.max_restarts) + "\nprogram:";
    for (const auto& word : attempt.program) text += " " + word;
    text += "\n";
    const size_t shown = std::min(kMostWorkers, attempt.failures.size());
    for (size_t at = 0; at < shown; ++at) {
      text += (at == 0 ? "\nfirst, " : "\nthen ") +
              section(attempt.failures[at], attempt.directory, more);
    }
    for (size_t at = shown; at < attempt.failures.size(); ++at) {
      text += "\nthen " + summary(attempt.failures[at]) + "\n";
    }
    const auto records = flight_records(attempt.directory);
    if (!records.empty()) {
      more = true;
      text += "\nwhat the ranks did last (lockstep inspect flight):\n";
      for (const auto& record : records) text += "  " + record.string() + "\n";
    }
    if (!more) return std::nullopt;
    const fs::path path = attempt.directory / "crash-report.txt";
    std::ofstream file(path, std::ios::binary);
    file << text;
    file.close();
    if (file) return path;
    std::error_code ignored;
    fs::remove(path, ignored);  // the disk is full
  } catch (const std::exception&) {
    // Out of memory, or a path that is no text.
  }
  return std::nullopt;
}

}  // namespace lockstep::internal

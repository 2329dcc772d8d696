#include "lockstep/launch/worker_failure.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>

#include "lockstep/base/left_file.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/launch/wait_status.h"

namespace lockstep::internal {
namespace {

constexpr size_t kLongestMessage = 2000;
// This many failures get a line of their own; of the others only the ranks are
// listed.
constexpr size_t kMostDescribed = 16;
// The report of the crash has all of them.
constexpr size_t kShownFrames = 6;
// At most this much of a file is read; a traceback has some kilobytes.
constexpr size_t kLargestFile = 1024 * 1024;

std::string printable(std::string text) {
  if (text.size() > kLongestMessage) {
    text.resize(kLongestMessage);
    text += " ...";
  }
  text = shown_text(text);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

std::string seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s",
                static_cast<double>(time.count()) / 1000);
  return text;
}

// Returns the text of the field `name`, or "" if it is not a string.
std::string text_of(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>()
                                                     : std::string();
}

// Parses a time since 1970. Returns nothing for 0 or less, or if it is not a
// number.
std::optional<int64_t> count_of(const std::string& text) {
  int64_t count = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), count);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && count > 0 ? std::optional(count) : std::nullopt;
}

std::optional<std::chrono::system_clock::time_point> time_of(
    const nlohmann::json& extra) {
  using std::chrono::system_clock;
  if (const auto count = count_of(text_of(extra, "time_ns"))) {
    return system_clock::time_point(
        std::chrono::duration_cast<system_clock::duration>(
            std::chrono::nanoseconds(*count)));
  }
  constexpr int64_t kLatest = 100'000'000'000;  // the year 5138
  if (const auto count = count_of(text_of(extra, "timestamp"));
      count && *count < kLatest) {
    return system_clock::time_point(std::chrono::seconds(*count + 1));
  }
  return std::nullopt;
}

// Returns the worker's own last words: of its error file, or else the last line
// that it wrote to a log; and what others said of it.
std::string words_of(const WorkerFailure& failure) {
  std::string words = failure.error.message;
  if (!failure.error.unreadable.empty()) {
    words = "its error file " + failure.error.unreadable;
  }
  if (failure.named_by.empty()) return words;
  for (const LogTail& log : failure.logs) {
    if (words.empty() && !log.lines.empty()) {
      words = "its last line: " + log.lines.back();
    }
  }
  return words + (words.empty() ? "" : "\n") + failure.named_by;
}

}  // namespace

ErrorRecord read_error_file(const std::filesystem::path& file) {
  ErrorRecord record;
  const auto text =
      read_left_file(file.parent_path(), file.filename(), kLargestFile);
  if (!text) {
    if (errno != ENOENT) {
      record.unreadable =
          errno == EINVAL || errno == ELOOP
              ? "is not a regular file"
              : std::string("cannot be read: ") + std::strerror(errno);
    }
    return record;
  }
  const auto json = nlohmann::json::parse(*text, nullptr, false);
  if (!json.is_object() || !json.contains("message")) {
    record.unreadable = text->empty()         ? "is empty; is the disk full?"
                        : json.is_discarded() ? "is no whole JSON"
                                              : "has no \"message\"";
    return record;
  }
  const auto& message = json["message"];
  record.message = printable(text_of(json, "message"));
  if (!message.is_object()) return record;
  record.message = printable(text_of(message, "message"));
  const auto extra = message.find("extraInfo");
  if (extra == message.end() || !extra->is_object()) return record;
  record.time = time_of(*extra);
  const std::string kind = text_of(*extra, "kind");
  if (kind == "cause") record.kind = FailureKind::cause;
  if (kind == "echo") {
    record.kind = FailureKind::echo;
    record.named = ranks_named_in(record.message);
  }
  return record;
}

std::set<int> ranks_named_in(const std::string& message) {
  // What comm/life_signs.cpp and comm/shm/protocol/waiting.cpp say.
  constexpr std::array<std::string_view, 4> kEnds{
      " died", " has left the group", " left because of an error", " failed:"};
  constexpr std::string_view kWord = "rank ";
  std::set<int> named;
  for (size_t at = message.find(kWord); at != std::string::npos;
       at = message.find(kWord, at + 1)) {
    int rank = 0;
    const char* begin = message.data() + at + kWord.size();
    const char* const last = message.data() + message.size();
    const auto [end, error] = std::from_chars(begin, last, rank);
    if (error != std::errc()) continue;
    const std::string_view rest(end, static_cast<size_t>(last - end));
    if (std::ranges::any_of(kEnds, [&](std::string_view words) {
          return rest.starts_with(words);
        })) {
      named.insert(rank);
    }
  }
  return named;
}

bool comes_before(const WorkerFailure& one, const WorkerFailure& other) {
  const auto order = [](const WorkerFailure& failure) {
    return std::tuple(failure.named_by.empty(), failure.error.kind,
                      failure.time(), !failure.signal.has_value(),
                      failure.rank);
  };
  return order(one) < order(other);
}

std::string headline(const WorkerFailure& failure) {
  const bool left = !failure.named_by.empty() && failure.exit_code == 0;
  std::string line = "rank " + std::to_string(failure.rank) +
                     (failure.hung ? " hung"
                      : left       ? " left while others needed it"
                                   : " failed");
  if (!failure.node.empty()) line += " on " + failure.node;
  line += ": ";
  if (failure.signal) {
    line += "killed by " + signal_name(*failure.signal) + " (";
  }
  line += "exit code " + std::to_string(failure.exit_code);
  if (failure.signal) line += ')';
  if (failure.was_stopped && !left) line += ", stopped while it was failing";
  return line;
}

std::string summary(const WorkerFailure& failure) {
  const std::string message = words_of(failure);
  std::string line = headline(failure);
  if (!message.empty()) line += ": " + message.substr(0, message.find('\n'));
  return line;
}

std::string describe(const std::vector<WorkerFailure>& failures,
                     int restarts_used, int max_restarts) {
  const WorkerFailure& first = failures.front();
  std::string block = headline(first);
  block += "\n  local rank " + std::to_string(first.local_rank) + ", pid " +
           std::to_string(first.pid) + ", after " + seconds(first.lifetime) +
           ", restarts used " + std::to_string(restarts_used) + " of " +
           std::to_string(max_restarts);
  std::string message = words_of(first);
  for (size_t at = message.find('\n'); at != std::string::npos;
       at = message.find('\n', at + 3)) {
    message.replace(at, 1, "\n  ");
  }
  if (!message.empty()) block += "\n  " + message;
  for (size_t at = 0; at < std::min(kShownFrames, first.stack.size()); ++at) {
    block += "\n  in " + first.stack[at];
  }
  for (size_t at = 1; at < failures.size(); ++at) {
    if (at == kMostDescribed) {
      block += "\n  then " + std::to_string(failures.size() - at) + " more:";
    }
    block += at < kMostDescribed ? "\n  then " + summary(failures[at])
                                 : " " + std::to_string(failures[at].rank);
  }
  return block;
}

}  // namespace lockstep::internal

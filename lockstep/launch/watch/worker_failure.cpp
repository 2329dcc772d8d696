#include "lockstep/launch/watch/worker_failure.h"

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <ranges>
#include <regex>
#include <string_view>
#include <tuple>

#include "lockstep/base/number_list.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/worker/native_stack.h"

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
  // The year 2255: system_clock counts nanoseconds.
  constexpr int64_t kLatest = 9'000'000'000;
  if (const auto count = count_of(text_of(extra, "timestamp"));
      count && *count < kLatest) {
    return system_clock::time_point(std::chrono::seconds(*count + 1));
  }
  return std::nullopt;
}

// Returns the worker's own last words: of its error file, or else the last line
// that it wrote to a log or through the launcher; and what others said of it.
std::string words_of(const WorkerFailure& failure) {
  std::string words = failure.error.message;
  if (!failure.error.unreadable.empty()) {
    words = "its error file " + failure.error.unreadable;
  }
  std::string line = failure.last_line;
  for (const LogTail& log : std::views::reverse(failure.logs)) {
    for (const auto& one : log.lines) {
      if (!one.empty()) line = one;
    }
  }
  // One that a signal killed has mostly said nothing about it.
  const bool may_have_told = !failure.signal || !failure.named_by.empty();
  if (words.empty() && !line.empty() && may_have_told) {
    words = "its last line: " + printable(line);
  }
  if (failure.named_by.empty()) return words;
  return words + (words.empty() ? "" : "\n") + failure.named_by;
}

// Returns whether all that is known of the worker's end is that it left its
// group: how the launcher stopped it then says nothing about the cause.
bool only_left(const WorkerFailure& failure) {
  return !failure.named_by.empty() &&
         (failure.exit_code == 0 ||
          (failure.was_stopped && failure.error.message.empty()));
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// Returns whether the worker's words say best why it failed. A signal other
// than that of an exception which nobody caught says more than words from
// before.
bool words_lead(const WorkerFailure& failure) {
  const std::string& words = failure.error.message;
  if (words.empty() || !failure.signal) return !words.empty();
  return (*failure.signal == SIGABRT || failure.hung || failure.was_stopped) &&
         !words.starts_with(signal_name(*failure.signal));
}

// Returns how the process ended: "killed by SIGKILL (exit code 137)".
std::string ending_of(const WorkerFailure& failure) {
  const bool left = only_left(failure);
  if (left && failure.exit_code != 0) {
    return "the launcher stopped it while it was ending";
  }
  std::string text = "exit code " + std::to_string(failure.exit_code);
  if (failure.signal) {
    text = "killed by " + signal_name(*failure.signal) + " (" + text + ")";
  }
  if (failure.was_stopped && !left) text += ", stopped while it was failing";
  return text;
}

// Returns "failed on node 1 (its host): " and what headline() ends with.
std::string what_happened(const WorkerFailure& failure) {
  return std::string(failure.hung         ? "hung"
                     : only_left(failure) ? "left while others needed it"
                                          : "failed") +
         (failure.node.empty() ? "" : " on " + failure.node) + ": " +
         (words_lead(failure) ? first_line(words_of(failure))
                              : ending_of(failure));
}

// Returns what summary() says after the ranks.
std::string in_one_line(const WorkerFailure& failure) {
  const std::string words = first_line(words_of(failure));
  return what_happened(failure) +
         (words.empty() || words_lead(failure) ? "" : ": " + words);
}

std::string ranks_of(const AlikeFailures& failures) {
  std::vector<int> ranks;
  for (const auto* failure : failures.all) ranks.push_back(failure->rank);
  std::ranges::sort(ranks);
  return name_numbers("rank", ranks);
}

// Replaces the rank itself, where a message names its author, and "12 ms" by
// marks.
std::string without_own(const std::string& text, int rank) {
  static const std::regex time("[0-9]+ ms");
  const std::regex own("(on rank |rank)" + std::to_string(rank) + "(?![0-9])");
  return std::regex_replace(std::regex_replace(text, time, "* ms"), own, "$1*");
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
                        : json.is_discarded() ? "is not complete JSON"
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
  constexpr std::string_view kWord = "rank";
  std::set<int> named;
  for (size_t at = message.find(kWord); at != std::string::npos;
       at = message.find(kWord, at + 1)) {
    std::string_view rest(message);
    rest.remove_prefix(at + kWord.size());
    rest.remove_prefix(rest.starts_with("s ")  ? 2
                       : rest.starts_with(' ') ? 1
                                               : 0);
    const auto ranks = read_numbers(rest);
    if (rest.starts_with(' ') &&
        std::ranges::any_of(EndingWords::all, [&](std::string_view words) {
          return rest.substr(1).starts_with(words);
        })) {
      named.insert(ranks.begin(), ranks.end());
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
  return "rank " + std::to_string(failure.rank) + " " + what_happened(failure);
}

std::string summary(const AlikeFailures& failures) {
  return ranks_of(failures) + " " + in_one_line(*failures.all.front());
}

std::string details(const WorkerFailure& failure) {
  std::string message = words_of(failure);
  if (words_lead(failure)) {
    message = ending_of(failure) + message.substr(first_line(message).size());
  }
  return message;
}

std::vector<AlikeFailures> alike(std::span<const WorkerFailure> failures) {
  std::vector<AlikeFailures> groups;
  std::map<std::string, size_t> places;
  for (const auto& failure : failures) {
    const auto [place, is_new] = places.emplace(
        without_own(in_one_line(failure), failure.rank), groups.size());
    if (is_new) groups.emplace_back();
    groups[place->second].all.push_back(&failure);
  }
  return groups;
}

std::string describe(const std::vector<WorkerFailure>& failures,
                     int restarts_used, int max_restarts) {
  const WorkerFailure& first = failures.front();
  std::string block = headline(first);
  block += "\n  local rank " + std::to_string(first.local_rank) + ", pid " +
           std::to_string(first.pid) + ", after " + seconds(first.lifetime) +
           ", restarts used " + std::to_string(restarts_used) + " of " +
           std::to_string(max_restarts);
  std::string message = details(first);
  for (size_t at = message.find('\n'); at != std::string::npos;
       at = message.find('\n', at + 3)) {
    message.replace(at, 1, "\n  ");
  }
  if (!message.empty()) block += "\n  " + message;
  for (const auto& frame : shown_frames(first.stack, kShownFrames)) {
    block += "\n  in " + frame;
  }
  AlikeFailures rest;
  size_t described = 0;
  for (AlikeFailures& group : alike(failures)) {
    const bool has_first = group.all.front() == &first;
    if (has_first) group.all.erase(group.all.begin());
    if (group.all.empty()) continue;
    if (++described > kMostDescribed) {
      rest.all.insert(rest.all.end(), group.all.begin(), group.all.end());
      continue;
    }
    block += "\n  then " +
             (has_first ? ranks_of(group) + " failed alike" : summary(group));
  }
  if (!rest.all.empty()) block += "\n  then " + ranks_of(rest) + " failed";
  return block;
}

}  // namespace lockstep::internal

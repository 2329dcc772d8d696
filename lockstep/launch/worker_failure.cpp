#include "lockstep/launch/worker_failure.h"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/launch/worker_process.h"

namespace lockstep {
namespace {

constexpr size_t kLongestMessage = 2000;
// What is read at most: a traceback is some kilobytes.
constexpr size_t kLargestFile = 1024 * 1024;

std::string printable(std::string text) {
  if (text.size() > kLongestMessage) {
    text.resize(kLongestMessage);
    text += " ...";
  }
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' && c != '\n') c = ' ';
  }
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

}  // namespace

std::string read_error_file(const std::filesystem::path& file) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored)) return {};
  std::ifstream stream(file, std::ios::binary);
  std::string text(kLargestFile, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(stream.gcount()));
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("message")) return {};
  const auto& message = json["message"];
  if (message.is_string()) return printable(message.get<std::string>());
  if (message.is_object() && message.contains("message") &&
      message["message"].is_string()) {
    return printable(message["message"].get<std::string>());
  }
  return {};
}

std::string headline(const WorkerFailure& failure) {
  std::string line = "rank " + std::to_string(failure.rank) + " failed";
  if (!failure.node.empty()) line += " on " + failure.node;
  line += ": ";
  if (failure.signal) {
    line += "killed by " + signal_name(*failure.signal) + " (";
  }
  line += "exit code " + std::to_string(failure.exit_code);
  if (failure.signal) line += ")";
  return line;
}

std::string describe(const WorkerFailure& failure, int restarts_used,
                     int max_restarts) {
  std::string block = headline(failure);
  block += "\n  local rank " + std::to_string(failure.local_rank) + ", pid " +
           std::to_string(failure.pid) + ", after " +
           seconds(failure.lifetime) + ", restarts used " +
           std::to_string(restarts_used) + " of " +
           std::to_string(max_restarts);
  std::string message = failure.message;
  for (size_t at = message.find('\n'); at != std::string::npos;
       at = message.find('\n', at + 3)) {
    message.replace(at, 1, "\n  ");
  }
  if (!message.empty()) block += "\n  " + message;
  return block;
}

}  // namespace lockstep

#include "lockstep/launch/agent/job_report.h"

#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "lockstep/base/whole_file.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kReportVersion = 1;

// Returns "2026-02-03T14:05:06.789Z".
std::string utc_text(JobReport::Time time) {
  const auto whole = std::chrono::floor<std::chrono::milliseconds>(time);
  const std::time_t seconds = JobReport::Time::clock::to_time_t(time);
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  char text[48];
  const size_t length =
      std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text + length, sizeof text - length, ".%03dZ",
                static_cast<int>(whole.time_since_epoch().count() % 1000));
  return text;
}

const char* kind_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::echo:
      return "echo";
    case FailureKind::unknown:
      return "unknown";
    default:
      return "cause";
  }
}

json path_json(const fs::path& path) {
  std::error_code error;
  return !path.empty() && fs::exists(path, error) ? json(path.string())
                                                  : json(nullptr);
}

json signal_json(std::optional<int> signal) {
  return signal ? json(signal_name(*signal)) : json(nullptr);
}

json failure_json(const WorkerFailure& failure, const std::string& host) {
  json logs = json::array();
  for (const LogTail& log : failure.logs) {
    logs.push_back({{"file", path_json(log.file)}, {"last_lines", log.lines}});
  }
  return {{"rank", failure.rank},
          {"local_rank", failure.local_rank},
          {"host", host},
          {"pid", failure.pid},
          {"exit_code", failure.exit_code},
          {"signal", signal_json(failure.signal)},
          {"hung", failure.hung},
          {"was_stopped", failure.was_stopped},
          {"kind", kind_name(failure.error.kind)},
          {"time", utc_text(failure.time())},
          {"seconds", static_cast<double>(failure.lifetime.count()) / 1000},
          {"message", failure.error.message},
          {"named_by", failure.named_by},
          {"stack", failure.stack},
          {"logs", std::move(logs)}};
}

json healed_json(const HealedFailure& healed, const std::string& host) {
  json all = failure_json(healed.failure, host);
  all["generation"] = healed.generation;
  all["new_pid"] = healed.pid != 0 ? json(healed.pid) : json(nullptr);
  return all;
}

json attempt_json(const FailedAttempt& attempt) {
  json failures = json::array();
  for (const auto& failure : attempt.failures) {
    failures.push_back(failure_json(failure, attempt.host));
  }
  json records = json::array();
  for (const auto& record : attempt.flight_records) {
    if (json path = path_json(record); !path.is_null()) {
      records.push_back(std::move(path));
    }
  }
  return {{"restart", attempt.restarts_used},
          {"cause", attempt.cause},
          {"directory", path_json(attempt.directory)},
          {"crash_report", path_json(attempt.crash_report)},
          {"stacks", path_json(attempt.stacks)},
          {"flight_records", std::move(records)},
          {"failures", std::move(failures)}};
}

const char* result_of(const JobReport& report) {
  if (report.exit_code == 0) return "succeeded";
  return report.signal != 0 ? "signalled" : "failed";
}

}  // namespace

void write_job_report(const JobReport& report, const fs::path& file) {
  const auto ended = std::chrono::system_clock::now();
  const auto ran = std::chrono::duration<double>(ended - report.started);
  json attempts = json::array();
  for (const auto& attempt : report.failed_attempts) {
    attempts.push_back(attempt_json(attempt));
  }
  json healed = json::array();
  for (const auto& one : report.healed) {
    healed.push_back(healed_json(one, report.host));
  }
  const json all{
      {"version", kReportVersion},
      {"result", result_of(report)},
      {"exit_code", report.exit_code},
      {"signal",
       report.signal != 0 ? json(signal_name(report.signal)) : json(nullptr)},
      {"cause", report.cause},
      {"run_id", report.run_id},
      {"program", report.program},
      {"host", report.host},
      {"node_rank", report.node_rank},
      {"nnodes", report.nnodes},
      {"world_size", report.world_size},
      {"restarts_used", report.restarts_used},
      {"max_restarts", report.max_restarts},
      {"healings", report.healings},
      {"membership_changes", report.membership_changes},
      {"started", utc_text(report.started)},
      {"ended", utc_text(ended)},
      {"seconds", ran.count()},
      {"failed_attempts", std::move(attempts)},
      {"healed", std::move(healed)}};
  // A path, an argument or a log may hold bytes that are not UTF-8.
  const std::string text =
      all.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  if (const int error = write_aside(file, text, /*is_private=*/false)) {
    throw std::system_error(error, std::generic_category(),
                            "writing the report " + file.string());
  }
}

}  // namespace lockstep::internal

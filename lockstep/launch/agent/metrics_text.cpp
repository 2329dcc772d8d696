#include "lockstep/launch/agent/metrics_text.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/process/system_file.h"

namespace lockstep::internal {
namespace {

struct Rank {
  const WorkerStatus& worker;
  std::optional<RankStatus> status;
  std::optional<ProcessUsage> usage;
};

// One metric of ranks: its value, or nothing if it is not known.
struct Metric {
  const char* name;
  const char* type;
  const char* help;
  std::function<std::optional<double>(const Rank&)> value;
};

double seconds(int64_t ns) { return static_cast<double>(ns) / 1e9; }

// Returns the moment as seconds since 1970; nothing for 0, which is never.
std::optional<double> time_of_day(int64_t steady) {
  if (steady == 0) return std::nullopt;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count() -
         seconds(steady_ns() - steady);
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\' || c == '"') result += '\\';
    if (c == '\n') {
      result += "\\n";
    } else {
      result += c;
    }
  }
  return result;
}

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.15g", value);
  return text;
}

std::string header(const char* name, const char* type, const char* help) {
  return std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " +
         type + "\n";
}

// Returns a metric of what the rank has published.
template <class Value>
std::function<std::optional<double>(const Rank&)> published(Value value) {
  return [value](const Rank& rank) -> std::optional<double> {
    if (!rank.status) return std::nullopt;
    return value(*rank.status);
  };
}

std::vector<Metric> metrics_of_ranks() {
  using Status = RankStatus;
  const auto count = [](int64_t value) {
    return std::optional(static_cast<double>(value));
  };
  const auto known = [](double value) {
    return value < 0 ? std::nullopt : std::optional(value);
  };
  return {
      {"lockstep_worker_up", "gauge", "Whether the worker runs.",
       [](const Rank& rank) -> std::optional<double> {
         return rank.worker.exit_code ? 0 : 1;
       }},
      {"lockstep_steps_total", "counter", "Steps of the training.",
       published([=](const Status& rank) { return count(rank.steps); })},
      {"lockstep_samples_total", "counter",
       "Samples that loaders gave to the training.",
       published([=](const Status& rank) { return count(rank.samples); })},
      {"lockstep_operations_total", "counter",
       "Operations of process groups that were begun.",
       published([=](const Status& rank) { return count(rank.operations); })},
      {"lockstep_communication_seconds_total", "counter",
       "Time with an operation under way, of lockstep_observed_seconds_total.",
       published([](const Status& rank) {
         return std::optional(seconds(rank.comm_ns));
       })},
      {"lockstep_observed_seconds_total", "counter",
       "Time in which the rank published.", published([](const Status& rank) {
         return std::optional(seconds(rank.observed_ns));
       })},
      {"lockstep_last_step_timestamp_seconds", "gauge",
       "When the last step began, since 1970.",
       published(
           [](const Status& rank) { return time_of_day(rank.last_step_ns); })},
      {"lockstep_last_snapshot_timestamp_seconds", "gauge",
       "When the last snapshot was written, since 1970.",
       published([](const Status& rank) {
         return time_of_day(rank.last_snapshot_ns);
       })},
      {"lockstep_worker_cpu_seconds_total", "counter",
       "CPU time of the worker.",
       [](const Rank& rank) -> std::optional<double> {
         if (!rank.usage) return std::nullopt;
         return seconds(rank.usage->cpu_ns);
       }},
      {"lockstep_worker_resident_memory_bytes", "gauge",
       "Memory of the worker in RAM, shared memory included.",
       [](const Rank& rank) -> std::optional<double> {
         if (!rank.usage) return std::nullopt;
         return static_cast<double>(rank.usage->resident_bytes);
       }},
      {"lockstep_gpu_utilization_ratio", "gauge",
       "How much of the last moment the GPUs of the rank computed, the mean.",
       published([=](const Status& rank) {
         return known(rank.gpu_busy_percent / 100);
       })},
      {"lockstep_gpu_memory_bytes", "gauge", "Memory of the rank on its GPUs.",
       published([=](const Status& rank) {
         return known(static_cast<double>(rank.gpu_memory_bytes));
       })},
      {"lockstep_gpu_power_watts", "gauge", "What the GPUs of the rank draw.",
       published([=](const Status& rank) { return known(rank.gpu_watts); })},
      {"lockstep_gpu_temperature_celsius", "gauge",
       "Temperature of the hottest GPU of the rank.",
       published([=](const Status& rank) { return known(rank.gpu_celsius); })},
  };
}

}  // namespace

std::string metrics_text(const JobStatus& job, const StatusBoard& board) {
  std::vector<Rank> ranks;
  for (const WorkerStatus& worker : job.workers) {
    const bool runs = !worker.exit_code;
    ranks.push_back({worker,
                     runs ? board.read(worker.local_rank) : std::nullopt,
                     runs ? usage_of(worker.pid) : std::nullopt});
  }
  const std::string labels = "run_id=\"" + escaped(job.run_id) +
                             "\",node_rank=\"" + std::to_string(job.node_rank) +
                             "\"";
  std::string text;
  const auto add = [&](const char* name, const char* type, const char* help,
                       double value) {
    text += header(name, type, help) + name + "{" + labels + "} " +
            number(value) + "\n";
  };
  add("lockstep_restarts_total", "counter", "Restarts of all workers.",
      job.restart);
  add("lockstep_world_size", "gauge", "Ranks of the job, of all nodes.",
      job.world_size);
  add("lockstep_running_seconds", "gauge", "How long the launcher runs.",
      seconds(steady_ns() - job.started_ns));
  for (const Metric& metric : metrics_of_ranks()) {
    std::string lines;
    for (const Rank& rank : ranks) {
      if (const auto value = metric.value(rank)) {
        lines += std::string(metric.name) + "{" + labels + ",rank=\"" +
                 std::to_string(rank.worker.rank) + "\"} " + number(*value) +
                 "\n";
      }
    }
    if (!lines.empty()) {
      text += header(metric.name, metric.type, metric.help) + lines;
    }
  }
  return text;
}

}  // namespace lockstep::internal

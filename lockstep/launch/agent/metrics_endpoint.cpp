#include "lockstep/launch/agent/metrics_endpoint.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/base/system_file.h"
#include "lockstep/launch/nodes/job_secret.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kClientTime{10'000};
constexpr milliseconds kIgnoredTime{1'000};
constexpr milliseconds kWithClients{1'000};
constexpr size_t kMostClients = 64;
constexpr size_t kLongestRequest = 8192;
constexpr int kBacklog = 64;

std::string response_of(const char* status, const char* type,
                        const std::string& body, bool with_body,
                        const char* header = "") {
  return std::string("HTTP/1.1 ") + status + "\r\nContent-Type: " + type +
         "\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\nConnection: close\r\n" + header + "\r\n" +
         (with_body ? body : "");
}

bool equals_ignoring_case(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, {}, [](unsigned char c) { return std::tolower(c); },
      [](unsigned char c) { return std::tolower(c); });
}

// Returns the token that a request sends; empty if there is none.
std::string_view token_of(std::string_view request) {
  constexpr std::string_view kScheme = "Bearer ";
  for (size_t at = request.find("\r\n"); at != request.npos;) {
    request.remove_prefix(at + 2);
    at = request.find("\r\n");
    const std::string_view line = request.substr(0, at);
    const size_t colon = line.find(':');
    if (colon == line.npos ||
        !equals_ignoring_case(line.substr(0, colon), "Authorization")) {
      continue;
    }
    std::string_view value = line.substr(colon + 1);
    value.remove_prefix(std::min(value.find_first_not_of(' '), value.size()));
    if (!equals_ignoring_case(value.substr(0, kScheme.size()), kScheme)) {
      return {};
    }
    value.remove_prefix(kScheme.size());
    return value.substr(0, value.find_last_not_of(' ') + 1);
  }
  return {};
}

std::string answer_to(std::string_view request, const std::string& token,
                      const MetricsEndpoint::Metrics& metrics) {
  constexpr const char* kText = "text/plain; charset=utf-8";
  const std::string_view line = request.substr(0, request.find("\r\n"));
  const size_t method_end = line.find(' ');
  const size_t path_end = line.find(' ', method_end + 1);
  if (method_end == std::string_view::npos ||
      path_end == std::string_view::npos ||
      !line.substr(path_end + 1).starts_with("HTTP/1.")) {
    return response_of("400 Bad Request", kText, "this is not a request\n",
                       true);
  }
  const std::string_view method = line.substr(0, method_end);
  const bool head = method == "HEAD";
  if (method != "GET" && !head) {
    return response_of("405 Method Not Allowed", kText,
                       "only GET and HEAD are known\n", true);
  }
  if (!token.empty() && !is_same_secret(token_of(request), token)) {
    return response_of("401 Unauthorized", kText,
                       "the token of the job's secret is missing or wrong\n",
                       !head, "WWW-Authenticate: Bearer\r\n");
  }
  std::string_view path =
      line.substr(method_end + 1, path_end - method_end - 1);
  path = path.substr(0, path.find('?'));
  if (path != "/metrics") {
    return response_of("404 Not Found", kText, "see /metrics\n", !head);
  }
  return response_of("200 OK", "text/plain; version=0.0.4; charset=utf-8",
                     metrics(), !head);
}

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

MetricsEndpoint MetricsEndpoint::listen(const MetricsOptions& options) {
  const SocketAddress address =
      resolve({options.address, options.port}).front();
  std::string token;
  if (!address.is_loopback() && !options.is_open) {
    if (!options.secret) {
      throw std::invalid_argument(
          "--metrics-address " + options.address +
          " lets other hosts read the metrics: give the job's secret (" +
          kJobSecretVariable +
          " or --rdzv-secret-file), of which readers then send a token; or "
          "--metrics-insecure, which lets everybody read them");
    }
    token = metrics_token(*options.secret);
  }
  FileDescriptor socket = bind_socket(address);
  if (!socket || ::listen(socket.get(), kBacklog) != 0 ||
      ::fcntl(socket.get(), F_SETFL, O_NONBLOCK) != 0) {
    const std::string where = "--metrics-port " + std::to_string(options.port);
    if (errno == EADDRNOTAVAIL) {
      throw std::invalid_argument("--metrics-address " + options.address +
                                  " is not an address of this host");
    }
    if (errno == EADDRINUSE) {
      throw std::invalid_argument(where +
                                  " is in use; give another, or 0 for a free "
                                  "one");
    }
    if (errno == EACCES) {
      throw std::invalid_argument(where +
                                  " needs privileges; give one from 1024 up, "
                                  "or 0 for a free one");
    }
    throw_errno("listening on " + where);
  }
  const int port = bound_address(socket.get()).port();
  return {std::move(socket), port, std::move(token)};
}

void MetricsEndpoint::add_poll_entries(std::vector<pollfd>& entries) const {
  if (ignored_until_.expired()) entries.push_back({listener_.get(), POLLIN, 0});
  for (const Client& client : clients_) {
    const short events = client.response.empty() ? POLLIN : POLLOUT;
    entries.push_back({client.socket.get(), events, 0});
  }
}

std::optional<Deadline> MetricsEndpoint::due() const {
  if (clients_.empty() && ignored_until_.expired()) return std::nullopt;
  return Deadline::after(kWithClients);
}

void MetricsEndpoint::handle_poll_entries(std::span<const pollfd> entries) {
  std::erase_if(clients_, [&](Client& client) {
    return client.deadline.expired() ||
           (has_come(entries, client.socket.get()) && serve(client));
  });
  if (has_come(entries, listener_.get())) accept_new();
}

void MetricsEndpoint::accept_new() {
  while (true) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr,
                                    SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      const bool none =
          errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
      // No descriptor is left: they wait in the listener's queue.
      if (!none) ignored_until_ = Deadline::after(kIgnoredTime);
      return;
    }
    if (clients_.size() == kMostClients) clients_.erase(clients_.begin());
    clients_.push_back({std::move(socket), Deadline::after(kClientTime)});
  }
}

bool MetricsEndpoint::serve(Client& client) const {
  if (client.response.empty()) {
    char bytes[4096];
    const ssize_t count = ::recv(client.socket.get(), bytes, sizeof bytes, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (count <= 0) return true;
    client.request.append(bytes, static_cast<size_t>(count));
    if (client.request.find("\r\n\r\n") != std::string::npos) {
      client.response = answer_to(client.request, token_, metrics_);
    } else if (client.request.size() > kLongestRequest) {
      client.response =
          response_of("431 Request Header Fields Too Large", "text/plain",
                      "the request is too long\n", true);
    } else {
      return false;
    }
  }
  const ssize_t sent = ::send(client.socket.get(), client.response.data(),
                              client.response.size(), MSG_NOSIGNAL);
  if (sent < 0) return errno != EAGAIN && errno != EINTR;
  client.response.erase(0, static_cast<size_t>(sent));
  return client.response.empty();
}

std::string metrics_text(const JobStatus& job, const StatusBoard& board) {
  std::vector<Rank> ranks;
  for (const WorkerStatus& worker : job.workers) {
    if (worker.rank < 0) continue;
    const bool runs = !worker.exit_code;
    ranks.push_back({worker,
                     runs ? board.read(worker.local_rank) : std::nullopt,
                     runs ? usage_of(worker.pid) : std::nullopt});
  }
  const std::string labels = "run_id=\"" + escaped(shown_line(job.run_id)) +
                             "\",node_rank=\"" + std::to_string(job.node_rank) +
                             "\"";
  std::string text;
  const auto add = [&](const char* name, const char* type, const char* help,
                       double value) {
    text += header(name, type, help) + name + "{" + labels + "} " +
            number(value) + "\n";
  };
  add("lockstep_restarts_total", "counter", "Restarts of all workers.",
      job.restart - job.healings);
  add("lockstep_healings_total", "counter",
      "How often a process took the place of a worker that failed.",
      job.healings);
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

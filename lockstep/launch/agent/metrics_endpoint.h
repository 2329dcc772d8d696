#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/process/event_loop.h"
#include "lockstep/launch/watch/job_status.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

// Where metrics are served, and to whom.
struct MetricsOptions {
  std::string address = "127.0.0.1";  // or a name
  int port = 0;                       // 0 for a free one
  // If the address is not a loopback address: clients must send
  // metrics_token() of this secret, or with `is_open` nothing.
  std::optional<std::string> secret{};
  bool is_open = false;
};

// Serves metrics at http://ADDRESS:PORT/metrics (HTTP/1.1, RFC 9112) to
// Prometheus and other programs: one request on each connection, GET or HEAD. A
// client that must send a token does so as RFC 6750, section 2.1, has it
// ("Authorization: Bearer TOKEN").
//
// A client that asks or reads slowly has 10 s, and the oldest of more than 64
// clients is dropped. For one thread.
class MetricsEndpoint : public Pollable {
 public:
  // Returns the text in Prometheus' format.
  using Metrics = std::function<std::string()>;

  // Throws std::invalid_argument if the port is in use or needs privileges, if
  // the address is not one of this host, or if it needs a secret and there is
  // none; std::system_error.
  static MetricsEndpoint listen(const MetricsOptions& options);

  int port() const { return port_; }
  bool wants_token() const { return !token_.empty(); }
  // Must be called before this object is in a loop.
  void set_metrics(Metrics metrics) { metrics_ = std::move(metrics); }
  void add_poll_entries(std::vector<pollfd>& entries) const override;
  std::optional<Deadline> due() const override;
  void handle_poll_entries(std::span<const pollfd> entries) override;

 private:
  struct Client {
    FileDescriptor socket;
    Deadline deadline;
    std::string request{};
    std::string response{};  // what is not sent yet; empty while it is asking
  };

  MetricsEndpoint(FileDescriptor listener, int port, std::string token)
      : listener_(std::move(listener)), port_(port), token_(std::move(token)) {}
  void accept_new();
  // Returns whether the client is done with.
  bool serve(Client& client) const;

  FileDescriptor listener_;
  int port_;
  std::string token_;  // that clients must send; empty if there is none
  Metrics metrics_{};
  std::vector<Client> clients_{};
  Deadline ignored_until_ = Deadline::after(std::chrono::milliseconds(0));
};

// Returns what is known of a job and its ranks in the text format of
// Prometheus (Prometheus documentation, "Exposition formats", version 0.0.4).
// Counters of a rank begin again at 0 when it is started again, as Prometheus
// expects of a counter. What a rank has not published is left out.
std::string metrics_text(const JobStatus& job, const StatusBoard& board);

}  // namespace lockstep::internal

#pragma once

#include <poll.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// Serves metrics at http://127.0.0.1:PORT/metrics (HTTP/1.1, RFC 9112) to
// Prometheus and other programs of this host: one request on each connection,
// GET or HEAD.
//
// For one thread, which waits in poll(). Never blocks: a client that asks or
// reads slowly has 10 s, and the oldest of more than 64 clients is dropped.
class MetricsEndpoint {
 public:
  // Listens at 127.0.0.1; `port` 0 is a free one. Throws std::invalid_argument
  // if the port is in use or needs privileges, std::system_error.
  static MetricsEndpoint listen(int port);

  int port() const { return port_; }
  void add_poll_entries(std::vector<pollfd>& entries) const;
  // How long poll() may wait at most; nothing is due before that.
  std::chrono::milliseconds most_wait() const;
  // `metrics` returns the text in Prometheus' format.
  void handle_poll_entries(const std::vector<pollfd>& entries,
                           const std::function<std::string()>& metrics);

 private:
  struct Client {
    FileDescriptor socket;
    Deadline deadline;
    std::string request{};
    std::string response{};  // what is not sent yet; empty: it is asking
  };

  MetricsEndpoint(FileDescriptor listener, int port)
      : listener_(std::move(listener)), port_(port) {}
  void accept_new();
  // Returns whether the client is done with.
  static bool serve(Client& client,
                    const std::function<std::string()>& metrics);

  FileDescriptor listener_;
  int port_;
  std::vector<Client> clients_{};
  Deadline deaf_until_ = Deadline::after(std::chrono::milliseconds(0));
};

}  // namespace lockstep::internal

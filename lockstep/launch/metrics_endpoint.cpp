#include "lockstep/launch/metrics_endpoint.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kClientTime{10'000};
constexpr milliseconds kDeafTime{1'000};
constexpr milliseconds kWithClients{1'000};
constexpr size_t kMostClients = 64;
constexpr size_t kLongestRequest = 8192;
constexpr int kBacklog = 64;

std::string response_of(const char* status, const char* type,
                        const std::string& body, bool with_body) {
  return std::string("HTTP/1.1 ") + status + "\r\nContent-Type: " + type +
         "\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\nConnection: close\r\n\r\n" + (with_body ? body : "");
}

std::string answer_to(std::string_view request,
                      const std::function<std::string()>& metrics) {
  constexpr const char* kText = "text/plain; charset=utf-8";
  const std::string_view line = request.substr(0, request.find("\r\n"));
  const size_t method_end = line.find(' ');
  const size_t path_end = line.find(' ', method_end + 1);
  if (method_end == std::string_view::npos ||
      path_end == std::string_view::npos ||
      !line.substr(path_end + 1).starts_with("HTTP/1.")) {
    return response_of("400 Bad Request", kText, "this is no request\n", true);
  }
  const std::string_view method = line.substr(0, method_end);
  const bool head = method == "HEAD";
  if (method != "GET" && !head) {
    return response_of("405 Method Not Allowed", kText,
                       "only GET and HEAD are known\n", true);
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

bool has_come(const std::vector<pollfd>& entries, int fd) {
  return std::ranges::any_of(entries, [&](const pollfd& entry) {
    return entry.fd == fd && entry.revents != 0;
  });
}

}  // namespace

MetricsEndpoint MetricsEndpoint::listen(int port) {
  FileDescriptor socket(
      ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("making a socket for --metrics-port");
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* at = reinterpret_cast<const sockaddr*>(&address);
  if (::bind(socket.get(), at, sizeof address) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    const std::string where = "--metrics-port " + std::to_string(port);
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
  sockaddr_in bound{};
  socklen_t bytes = sizeof bound;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &bytes);
  return {std::move(socket), ntohs(bound.sin_port)};
}

void MetricsEndpoint::add_poll_entries(std::vector<pollfd>& entries) const {
  if (deaf_until_.expired()) entries.push_back({listener_.get(), POLLIN, 0});
  for (const Client& client : clients_) {
    const short events = client.response.empty() ? POLLIN : POLLOUT;
    entries.push_back({client.socket.get(), events, 0});
  }
}

milliseconds MetricsEndpoint::most_wait() const {
  return clients_.empty() && deaf_until_.expired() ? milliseconds::max()
                                                   : kWithClients;
}

void MetricsEndpoint::handle_poll_entries(
    const std::vector<pollfd>& entries,
    const std::function<std::string()>& metrics) {
  std::erase_if(clients_, [&](Client& client) {
    return client.deadline.expired() ||
           (has_come(entries, client.socket.get()) && serve(client, metrics));
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
      if (!none) deaf_until_ = Deadline::after(kDeafTime);
      return;
    }
    if (clients_.size() == kMostClients) clients_.erase(clients_.begin());
    clients_.push_back({std::move(socket), Deadline::after(kClientTime)});
  }
}

bool MetricsEndpoint::serve(Client& client,
                            const std::function<std::string()>& metrics) {
  if (client.response.empty()) {
    char bytes[4096];
    const ssize_t count = ::recv(client.socket.get(), bytes, sizeof bytes, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (count <= 0) return true;
    client.request.append(bytes, static_cast<size_t>(count));
    if (client.request.find("\r\n\r\n") != std::string::npos) {
      client.response = answer_to(client.request, metrics);
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

}  // namespace lockstep::internal

#include "lockstep/launch/rendezvous/store_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "lockstep/launch/endpoint.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using Operation = Request::Operation;
using Progress = StoreChannel::Progress;

constexpr size_t kReadBytes = 16 << 10;

[[noreturn]] void fail_closed() {
  throw AgentStoreError("the connection is closed");
}

int poll_timeout(milliseconds left) {
  return static_cast<int>(bounded_timeout(left).count());
}

}  // namespace

StoreClient::StoreClient(FileDescriptor socket,
                         const std::optional<std::string>& secret,
                         const Deadline& deadline)
    : secret_(secret),
      tls_(secret ? std::make_unique<TlsSettings>(TlsSettings::Side::client,
                                                  *secret)
                  : nullptr),
      channel_(std::move(socket), tls_.get()) {
  shake_hands(deadline);
  call({.operation = Operation::hello, .number = kStoreVersion}, deadline);
}

// Keeps the connection that has shaken hands.
class StoreClient::Line : public StoreLine {
 public:
  explicit Line(std::unique_ptr<StoreClient> client)
      : client_(std::move(client)) {}

  int fd() const override { return client_->channel_.fd(); }
  Progress read(std::string& bytes, size_t most) override {
    return progress_of(client_->channel_.read(bytes, most));
  }
  Progress write(std::string& bytes) override {
    return progress_of(client_->channel_.write(bytes));
  }

 private:
  static Progress progress_of(StoreChannel::Progress progress) {
    switch (progress) {
      case StoreChannel::Progress::done:
        return Progress::done;
      case StoreChannel::Progress::wants_input:
        return Progress::wants_input;
      case StoreChannel::Progress::wants_output:
        return Progress::wants_output;
      default:
        return Progress::closed;
    }
  }

  std::unique_ptr<StoreClient> client_;
};

std::unique_ptr<StoreLine> StoreClient::make_line(
    FileDescriptor socket, const std::optional<std::string>& secret,
    const Deadline& deadline) {
  return std::make_unique<Line>(
      std::make_unique<StoreClient>(std::move(socket), secret, deadline));
}

std::unique_ptr<StoreLine> StoreClient::open_line(const Deadline& deadline) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (getpeername(channel_.fd(), reinterpret_cast<sockaddr*>(&name), &length) !=
      0) {
    fail_closed();
  }
  const SocketAddress host(reinterpret_cast<sockaddr*>(&name), length);
  FileDescriptor socket = connect_to(host, deadline.remaining());
  if (!socket) fail_closed();
  return make_line(std::move(socket), secret_, deadline);
}

void StoreClient::shake_hands(const Deadline& deadline) {
  while (true) {
    switch (channel_.handshake()) {
      case Progress::done:
        return;
      case Progress::wants_input:
        await_socket(POLLIN, deadline);
        break;
      case Progress::wants_output:
        await_socket(POLLOUT, deadline);
        break;
      case Progress::closed:
        throw AgentStoreError(
            "the process that listens there does not shake hands; the agents "
            "of all nodes need the same --rdzv-backend, with a secret or "
            "without");
      case Progress::refused:
        throw AgentStoreRefused("the agent there has another secret");
    }
  }
}

void StoreClient::await_socket(short events, const Deadline& deadline) {
  pollfd entry{channel_.fd(), events, 0};
  // An interrupted poll() counts as ready: the channel is asked again.
  if (poll(&entry, 1, poll_timeout(deadline.remaining())) == 0 &&
      deadline.expired()) {
    throw AgentStoreError("no answer came");
  }
}

void StoreClient::send(const Request& request, const Deadline& deadline) {
  std::string bytes = encode(request);
  while (true) {
    switch (channel_.write(bytes)) {
      case Progress::done:
        return;
      case Progress::wants_input:
        await_socket(POLLIN, deadline);
        break;
      case Progress::wants_output:
        await_socket(POLLOUT, deadline);
        break;
      default:
        fail_closed();
    }
  }
}

std::optional<Reply> StoreClient::take_reply() {
  try {
    while (true) {
      if (const auto message = input_.take()) return parse_reply(*message);
      std::string bytes;
      switch (channel_.read(bytes, kReadBytes)) {
        case Progress::done:
          input_.append(bytes);
          break;
        case Progress::wants_input:
          wanted_events_ = POLLIN;
          return std::nullopt;
        case Progress::wants_output:
          wanted_events_ = POLLOUT;
          return std::nullopt;
        default:
          fail_closed();
      }
    }
  } catch (const MalformedMessage& error) {
    throw AgentStoreError(std::string("its host is no agents' store: ") +
                          error.what());
  }
}

Reply StoreClient::call(const Request& request, const Deadline& deadline) {
  if (request.key.size() > kMostKeyBytes ||
      request.value.size() > kMostValueBytes) {
    throw AgentStoreError(
        "a record of " + std::to_string(request.value.size()) +
        " bytes is too long; allowed are " + std::to_string(kMostValueBytes));
  }
  send(request, deadline);
  while (true) {
    auto reply = take_reply();
    if (!reply) {
      await_socket(wanted_events_, deadline);
    } else if (std::exchange(is_awaiting_, false)) {
      // This reply is to await_change(), which has returned without it: the
      // next call asks for the same changes.
    } else if (reply->kind == Reply::Kind::refused) {
      throw AgentStoreError(reply->text);
    } else {
      return std::move(*reply);
    }
  }
}

void StoreClient::set(const std::string& key, const std::string& value) {
  call({.operation = Operation::set, .key = key, .value = value});
}

std::optional<std::string> StoreClient::get(const std::string& key) {
  Reply reply = call({.operation = Operation::get, .key = key});
  if (reply.kind != Reply::Kind::text) return std::nullopt;
  return std::move(reply.text);
}

bool StoreClient::check(const std::string& key) { return get(key).has_value(); }

int64_t StoreClient::add(const std::string& key, int64_t amount) {
  return call({.operation = Operation::add, .key = key, .number = amount})
      .number;
}

void StoreClient::remove(const std::string& key) {
  call({.operation = Operation::remove, .key = key});
}

std::string StoreClient::set_if_absent(const std::string& key,
                                       const std::string& value) {
  return call({.operation = Operation::set_if_absent,
               .key = key,
               .value = value})
      .text;
}

void StoreClient::await_change(const std::vector<std::string>& keys,
                               milliseconds allowed, int wake_fd) {
  const Deadline deadline = Deadline::after(allowed);
  if (is_awaiting_) {
    // The reply to an earlier wait comes first; a request without effect ends
    // that wait.
    check(keys.front());
  }
  send({.operation = Operation::await_change,
        .number = last_change_,
        .keys = keys},
       deadline);
  is_awaiting_ = true;
  while (true) {
    if (const auto reply = take_reply()) {
      is_awaiting_ = false;
      last_change_ = reply->number;
      return;
    }
    pollfd entries[] = {{channel_.fd(), wanted_events_, 0},
                        {wake_fd, POLLIN, 0}};
    const int ready = poll(entries, 2, poll_timeout(deadline.remaining()));
    if (entries[1].revents != 0 || (ready == 0 && deadline.expired())) return;
  }
}

}  // namespace lockstep::internal

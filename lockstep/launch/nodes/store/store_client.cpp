#include "lockstep/launch/nodes/store/store_client.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using Operation = Request::Operation;
using Progress = StoreChannel::Progress;

constexpr size_t kReadBytes = 16 << 10;
// How long the other host may acknowledge nothing. Its kernel acknowledges even
// while its agent is stopped, so this can be short.
constexpr milliseconds kDeadHostAllowance{2500};
// The times of a try to connect again. The way to the other host may heal at
// any moment, and TCP alone would wait for as long again before it tries.
constexpr milliseconds kTryInterval{100};
constexpr milliseconds kTryAllowance{500};
constexpr milliseconds kHelloAllowance{3000};
// How long the host may refuse connections before the store's process counts as
// ended: a proxy between the hosts may start again.
constexpr milliseconds kRefusalAllowance{1000};

constexpr const char* kNoHandshake =
    "the process that listens there does not shake hands; the agents of all "
    "nodes need the same --rdzv-backend, with a secret or without";

// The host of the store does not know this agent any more.
class SessionOver : public AgentStoreError {
 public:
  using AgentStoreError::AgentStoreError;
};

class ConnectionClosed : public AgentStoreError {
 public:
  using AgentStoreError::AgentStoreError;
};

[[noreturn]] void fail_closed() {
  throw ConnectionClosed("the connection is closed");
}

int poll_timeout(milliseconds left) {
  return static_cast<int>(bounded_timeout(left).count());
}

// Returns the address of the other side of a connection.
SocketAddress peer_of(int socket) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&name), &length) != 0) {
    fail_closed();
  }
  return {reinterpret_cast<sockaddr*>(&name), length};
}

// Without probes of the kernel, which would end the other side's connection by
// a reset: to the store that would look like the end of this agent.
void break_if_unacknowledged(int socket) {
  const int allowed = static_cast<int>(kDeadHostAllowance.count());
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &allowed, sizeof(allowed));
}

}  // namespace

StoreClient::StoreClient(FileDescriptor socket,
                         const std::optional<std::string>& secret,
                         const Deadline& deadline,
                         std::optional<Rejoining> rejoining)
    : secret_(secret),
      rejoining_(std::move(rejoining)),
      tls_(secret ? std::make_unique<TlsSettings>(TlsSettings::Side::client,
                                                  *secret)
                  : nullptr),
      channel_(std::move(socket), tls_.get()) {
  if (rejoining_) {
    host_ = peer_of(channel_.fd());
    break_if_unacknowledged(channel_.fd());
  }
  begin(deadline);
}

bool StoreClient::begin(const Deadline& deadline) {
  Reply reply;
  try {
    shake_hands(deadline);
    reply = exchange({.operation = Operation::hello, .number = kStoreVersion},
                     deadline);
  } catch (const ConnectionClosed&) {
    throw AgentStoreStranger(kNoHandshake);
  }
  if (reply.kind == Reply::Kind::refused) throw AgentStoreError(reply.text);
  if (!rejoining_) return false;
  reply = exchange({.operation = Operation::session,
                    .key = rejoining_->agent,
                    .number = calls_},
                   deadline);
  if (reply.kind == Reply::Kind::refused) throw SessionOver(reply.text);
  return calls_ > 0 && reply.number == calls_;
}

template <class Begin>
auto StoreClient::reach_host(
    const std::function<bool()>& over,
    const std::function<void(const std::string&)>& failed,
    const Begin& begin_on) {
  bool refused = false;  // by every try since `allowance` began
  Deadline allowance = Deadline::after(kRefusalAllowance);
  while (!over()) {
    FileDescriptor socket = connect_to(*host_, kTryAllowance);
    std::string why = std::strerror(errno);
    const bool refused_now = !socket && errno == ECONNREFUSED;
    if (refused_now && !refused) {
      allowance = Deadline::after(kRefusalAllowance);
    } else if (refused_now && allowance.expired()) {
      break;
    }
    refused = refused_now;
    if (socket) {
      try {
        return begin_on(std::move(socket), Deadline::after(kHelloAllowance));
      } catch (const SessionOver&) {
        throw;
      } catch (const AgentStoreError& error) {
        why = error.what();  // the way to the host has broken again
      }
    }
    if (!refused) failed(why);
    std::this_thread::sleep_for(kTryInterval);
  }
  fail_closed();
}

bool StoreClient::rejoin() {
  // A host that has just been killed may take a connection before it refuses
  // them, and is told as lost soon.
  const auto patience = Deadline::after(kRefusalAllowance);
  bool told = false;
  const auto failed = [&](const std::string& why) {
    if (patience.expired() && !std::exchange(told, true)) {
      rejoining_->broken(why);
    }
  };
  return reach_host(rejoining_->given_up, failed,
                    [&](FileDescriptor socket, const Deadline& deadline) {
                      break_if_unacknowledged(socket.get());
                      channel_ = StoreChannel(std::move(socket), tls_.get());
                      input_ = {};
                      is_awaiting_ = false;
                      const bool done = begin(deadline);
                      if (told) rejoining_->back();
                      return done;
                    });
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
  if (!rejoining_) {
    FileDescriptor socket =
        connect_to(peer_of(channel_.fd()), deadline.remaining());
    if (!socket) fail_closed();
    return make_line(std::move(socket), secret_, deadline);
  }
  return reach_host(
      [&] { return deadline.expired() || rejoining_->given_up(); },
      [](const auto&) {},
      [&](FileDescriptor socket, const Deadline& until) {
        return make_line(std::move(socket), secret_, until);
      });
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
        throw AgentStoreStranger(kNoHandshake);
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
    throw AgentStoreStranger(
        std::string("a process that is not an agents' store listens there: ") +
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
  ++calls_;
  std::optional<Reply> reply;
  bool done = false;
  while (!reply) {
    try {
      reply = done ? await_reply(deadline) : exchange(request, deadline);
    } catch (const AgentStoreError&) {
      if (!rejoining_) throw;
      done = rejoin();
    }
  }
  if (reply->kind == Reply::Kind::refused) throw AgentStoreError(reply->text);
  return std::move(*reply);
}

Reply StoreClient::exchange(const Request& request, const Deadline& deadline) {
  send(request, deadline);
  return await_reply(deadline);
}

Reply StoreClient::await_reply(const Deadline& deadline) {
  while (true) {
    auto reply = take_reply();
    if (!reply) {
      await_socket(wanted_events_, deadline);
    } else if (std::exchange(is_awaiting_, false)) {
      // This reply is to await_change(), which has returned without it: the
      // next call asks for the same changes.
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
  try {
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
  } catch (const AgentStoreError&) {
    if (!rejoining_) throw;
    // The next call asks for the same changes.
    while (rejoin()) {
      try {
        await_reply(Deadline::after(kHelloAllowance));  // of an earlier call
        return;
      } catch (const AgentStoreError&) {
        // The way to the host has broken again.
      }
    }
  }
}

}  // namespace lockstep::internal

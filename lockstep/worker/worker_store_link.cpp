#include "lockstep/worker/worker_store_link.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <span>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/base/packet_socket.h"

namespace lockstep::internal {
namespace {

using Kind = WorkerReply::Kind;
using Operation = WorkerCall::Operation;
using std::chrono::milliseconds;

constexpr milliseconds kConnectPause{10};
constexpr size_t kReadBytes = 16 << 10;
// How much of a list of keys goes into one call.
constexpr size_t kListBytes = kMostWorkerMessageBytes / 2;

[[noreturn]] void fail_lost() {
  throw WorkerStoreLost(
      "the launcher's agent has closed the store of the workers: the agent "
      "ended, or lost the agents' store");
}

// Waits until `socket` is ready for `events`; returns false at the deadline.
bool await(const FileDescriptor& socket, short events,
           const Deadline& deadline) {
  while (true) {
    pollfd entry{socket.get(), events, 0};
    const auto left = bounded_timeout(deadline.remaining());
    const int ready = ::poll(&entry, 1, static_cast<int>(left.count()));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw_errno("poll of the workers' store");
    if (ready == 0 && deadline.expired()) return false;
  }
}

void require_length(const std::string& what, size_t bytes, size_t most) {
  if (bytes <= most) return;
  throw std::invalid_argument("the store of the workers takes no " + what +
                              " of " + std::to_string(bytes) +
                              " bytes; allowed are " + std::to_string(most));
}

// Calls `use` with the keys in lists that fit into a message, until it returns
// false. Returns whether it never did.
template <typename Use>
bool for_each_list(const std::vector<std::string>& keys, Use use) {
  for (size_t begin = 0; begin < keys.size();) {
    size_t end = begin;
    for (size_t bytes = 0; end < keys.size(); ++end) {
      bytes += keys[end].size() + 2;
      if (end > begin && bytes > kListBytes) break;
    }
    const std::span list(keys.data() + begin, end - begin);
    if (!use(std::vector<std::string>(list.begin(), list.end()))) return false;
    begin = end;
  }
  return true;
}

}  // namespace

WorkerStoreLink::WorkerStoreLink(std::string name, const Deadline& deadline)
    : name_(std::move(name)) {
  idle_.push_back(connect(deadline));
}

WorkerStoreLink::Connection WorkerStoreLink::connect(
    const Deadline& deadline) const {
  FileDescriptor socket;
  while (!(socket = connect_to(name_, SocketKind::stream))) {
    if (errno != EAGAIN) {
      throw WorkerStoreLost(
          "the store of the workers at the Unix socket " + name_ +
          " cannot be reached (" + std::generic_category().message(errno) +
          "): its launcher has ended, or this process is in another network "
          "namespace; then start it with --worker-store=tcp");
    }
    if (deadline.expired()) {
      throw WorkerStoreLost(
          "the launcher's agent takes no connection at the "
          "Unix socket " +
          name_ + " after " + std::to_string(deadline.elapsed().count()) +
          " ms");
    }
    std::this_thread::sleep_for(std::min(kConnectPause, deadline.remaining()));
  }
  if (!is_own_or_roots(socket)) {
    throw WorkerStoreLost("the Unix socket " + name_ +
                          " belongs to another user, not to the launcher");
  }
  return {.socket = std::move(socket)};
}

WorkerStoreLink::Connection WorkerStoreLink::take_idle(
    const Deadline& deadline) {
  if (made_in_.is_foreign()) {
    throw WorkerStoreLost(
        "this process was forked from a rank, whose connections to the store "
        "of the workers it must not use");
  }
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      Connection connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  return connect(deadline);
}

void WorkerStoreLink::give_back(Connection connection) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(connection));
}

std::optional<WorkerReply> WorkerStoreLink::receive(
    Connection& connection, const Deadline& deadline) const {
  try {
    while (true) {
      if (const auto message = connection.input.take()) {
        return parse_worker_reply(*message);
      }
      std::array<char, kReadBytes> bytes;
      const ssize_t got = ::recv(connection.socket.get(), bytes.data(),
                                 bytes.size(), MSG_DONTWAIT);
      if (got > 0) {
        connection.input.append({bytes.data(), static_cast<size_t>(got)});
      } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        fail_lost();
      } else if (!await(connection.socket, POLLIN, deadline)) {
        return std::nullopt;
      }
    }
  } catch (const MalformedMessage& error) {
    throw WorkerStoreLost(std::string("no store of workers answers: ") +
                          error.what());
  }
}

std::optional<WorkerReply> WorkerStoreLink::exchange(
    Connection& connection, const WorkerCall& call,
    const Deadline& deadline) const {
  const std::string bytes = with_length(bytes_of(call));
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t count =
        ::send(connection.socket.get(), bytes.data() + sent,
               bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      sent += static_cast<size_t>(count);
    } else if (errno != EAGAIN && errno != EINTR) {
      fail_lost();
    } else if (!await(connection.socket, POLLOUT, deadline)) {
      // A part of the message may be sent, so nothing can follow it.
      connection.socket.reset();
      return std::nullopt;
    }
  }
  if (connection.owes_reply) {
    if (!receive(connection, deadline)) return std::nullopt;
    connection.owes_reply = false;
  }
  return receive(connection, deadline);
}

WorkerReply WorkerStoreLink::call(const WorkerCall& call,
                                  const Deadline& deadline) {
  require_length("key", call.key.size(), kMostWorkerKeyBytes);
  require_length("value", std::max(call.value.size(), call.expected.size()),
                 kMostWorkerValueBytes);
  Connection connection = take_idle(deadline);
  auto reply = exchange(connection, call, deadline);
  if (!reply) {
    throw WorkerStoreLost(
        "the launcher's agent, which keeps the store of the workers, has not "
        "answered after " +
        std::to_string(deadline.elapsed().count()) + " ms (allowed " +
        std::to_string(deadline.allowed().count()) + " ms); is it stopped?");
  }
  give_back(std::move(connection));
  return std::move(*reply);
}

bool WorkerStoreLink::check(const std::vector<std::string>& keys,
                            const Deadline& deadline) {
  return for_each_list(keys, [&](std::vector<std::string> list) {
    return call({.operation = Operation::check, .keys = std::move(list)},
                deadline)
               .kind == Kind::done;
  });
}

bool WorkerStoreLink::wait(const std::vector<std::string>& keys,
                           const Deadline& deadline) {
  return for_each_list(keys, [&](std::vector<std::string> list) {
    Connection connection = take_idle(deadline);
    const auto reply = exchange(
        connection, {.operation = Operation::wait, .keys = std::move(list)},
        deadline);
    if (!reply) {
      // The next call on this connection ends the wait.
      if (connection.socket && !connection.owes_reply) {
        connection.owes_reply = true;
        give_back(std::move(connection));
      }
      return false;
    }
    give_back(std::move(connection));
    if (reply->kind == WorkerReply::Kind::refused) {
      throw std::invalid_argument("the store of the workers refuses a wait: " +
                                  reply->text);
    }
    return true;
  });
}

}  // namespace lockstep::internal

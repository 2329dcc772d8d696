#include "lockstep/launch/nodes/store/store_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using Progress = StoreChannel::Progress;

constexpr const char* kWhat = "the agents' store";
constexpr uint64_t kListener = 1;
constexpr uint64_t kTrusted = 2;
constexpr uint64_t kFirstConnection = 3;
// The payload of a record of TLS, so that none is read in part.
constexpr size_t kReadBytes = 16 << 10;
// Those that come must not starve the others.
constexpr int kAcceptsAtOnce = 64;
constexpr size_t kMostHelloBytes = 64;
constexpr milliseconds kLook{250};  // while a connection is due
constexpr milliseconds kLongestStep{2000};
constexpr milliseconds kIgnoredTime{1000};
// An agent sends something twice a second. If nothing has come for this long,
// a connection that breaks was cut before.
constexpr milliseconds kLongSilence{2000};
// How long an agent whose connection was closed, as by the end of its process,
// still counts as one that may rejoin.
constexpr milliseconds kUntilRejoined{500};
constexpr size_t kMostSessions = 16384;
// When the kernel asks whether the host of a silent connection lives.
constexpr int kProbeAfterSeconds = 60;
constexpr int kProbeSeconds = 20;

// So that connections of hosts that are gone do not stay for ever.
void probe_when_silent(int socket) {
  const int on = 1;
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kProbeAfterSeconds,
             sizeof(kProbeAfterSeconds));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeSeconds,
             sizeof(kProbeSeconds));
}

// Returns whether a connection that is over was ended by the other side's
// process. Its kernel then sends the end of the stream; or a reset, if the
// process had not read everything. But a reset also comes from a host that was
// cut off and has given the connection up.
bool is_end_of_process(int socket, bool was_silent) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return true;
  return info.tcpi_state == TCP_CLOSE_WAIT ||
         (info.tcpi_state == TCP_CLOSE && !was_silent);
}

}  // namespace

StoreServer::StoreServer(FileDescriptor listener, FileDescriptor own,
                         const std::optional<std::string>& secret,
                         StoreServerLimits limits)
    : EpollServer(kWhat),
      limits_(limits),
      listener_(std::move(listener)),
      news_(make_event_fd(kWhat)),
      awake_(kLongestStep),
      next_id_(kFirstConnection) {
  if (secret) tls_.emplace(TlsSettings::Side::server, *secret);
  stop_blocking(listener_.get());
  watch(news_.get(), kTrusted, news_events_, EPOLLIN);
  watch(listener_.get(), kListener, listener_events_, EPOLLIN);
  Connection& trusted = adopt(std::move(own), nullptr);
  await_events(trusted, EPOLLIN);
  start();
}

void StoreServer::serve_too(FileDescriptor socket) {
  const std::lock_guard lock(mutex_);
  trusted_.push_back(std::move(socket));
  const uint64_t one = 1;
  [[maybe_unused]] auto ignored = ::write(news_.get(), &one, sizeof(one));
}

void StoreServer::adopt_trusted() {
  uint64_t count = 0;
  [[maybe_unused]] auto ignored = ::read(news_.get(), &count, sizeof(count));
  std::vector<FileDescriptor> sockets;
  {
    const std::lock_guard lock(mutex_);
    sockets.swap(trusted_);
  }
  for (FileDescriptor& socket : sockets) {
    await_events(adopt(std::move(socket), nullptr), EPOLLIN);
  }
}

void StoreServer::give_up() noexcept {
  connections_.clear();
  listener_.reset();
}

int StoreServer::longest_wait() const {
  return !dated_.empty() || ignored_until_ ? static_cast<int>(kLook.count())
                                           : -1;
}

void StoreServer::serve_event(Id id, uint32_t /*events*/) {
  if (id == kTrusted) return adopt_trusted();
  if (id == kListener) return accept_new();
  // An earlier event may have dropped it.
  const auto found = connections_.find(id);
  if (found != connections_.end() && !serve(*found->second)) drop(id);
}

void StoreServer::end_events() {
  listen_again();
  // After the events: what has come while this process was stopped counts.
  drop_overdue();
}

void StoreServer::accept_new() {
  for (int accepted = 0; accepted < kAcceptsAtOnce; ++accepted) {
    FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr,
                                  SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM ||
          errno == ENOBUFS) {
        watch(listener_.get(), kListener, listener_events_, 0);
        ignored_until_ = awake_.awake() + kIgnoredTime;
      }
      return;
    }
    probe_when_silent(socket.get());
    if (strangers_.size() >= limits_.strangers) drop(*strangers_.begin());
    Connection& connection = adopt(std::move(socket), tls_ ? &*tls_ : nullptr);
    strangers_.insert(connection.id);
    set_due(connection);
    await_events(connection, EPOLLIN);
  }
}

StoreServer::Connection& StoreServer::adopt(FileDescriptor socket,
                                            const TlsSettings* tls) {
  auto connection = std::make_unique<Connection>(
      Connection{.id = next_id_++, .channel = {std::move(socket), tls}});
  return *connections_.emplace(connection->id, std::move(connection))
              .first->second;
}

void StoreServer::drop(Id id) {
  const auto found = connections_.find(id);
  end_wait(*found->second);
  leave_round(*found->second);
  leave_session(*found->second);
  strangers_.erase(id);
  dated_.erase(id);
  connections_.erase(found);  // closing the socket removes it from epoll
}

bool StoreServer::serve(Connection& connection) {
  try {
    switch (connection.channel.handshake()) {
      case Progress::done:
        break;
      case Progress::wants_input:
        await_events(connection, EPOLLIN);
        return true;
      case Progress::wants_output:
        await_events(connection, EPOLLOUT);
        return true;
      default:
        return false;
    }
    for (int reads = 0;; ++reads) {
      if (!answer_all(connection)) return false;
      if (!connection.output.empty()) return true;  // is awaited already
      std::string bytes;
      const Progress progress = reads < kReadsAtOnce
                                    ? connection.channel.read(bytes, kReadBytes)
                                    : Progress::wants_input;
      if (progress == Progress::closed) return false;
      connection.input.append(bytes);
      if (progress == Progress::done) continue;
      set_due(connection);
      await_events(connection,
                   progress == Progress::wants_output ? EPOLLOUT : EPOLLIN);
      return true;
    }
  } catch (const MalformedMessage&) {
    return false;
  }
}

bool StoreServer::answer_all(Connection& connection) {
  // Nothing more is answered before a reply is taken, so that the output stays
  // one message.
  while (flush(connection)) {
    if (!connection.output.empty()) return true;
    const auto message = connection.input.take(
        connection.is_stranger ? kMostHelloBytes : kMostMessageBytes);
    if (!message) return true;
    answer(connection, *message);
  }
  return false;
}

bool StoreServer::flush(Connection& connection) {
  const Progress progress = connection.channel.write(connection.output);
  set_due(connection);
  if (progress == Progress::closed) return false;
  await_events(connection,
               progress == Progress::wants_output ? EPOLLOUT : EPOLLIN);
  return true;
}

void StoreServer::answer(Connection& connection, const std::string& message) {
  Request request = parse_request(message);
  connection.heard = Clock::now();
  // A connection has one request at a time. What comes while it waits ends the
  // wait.
  end_wait(connection);
  const bool is_hello = request.operation == Request::Operation::hello;
  if (!is_hello && connection.is_stranger) {
    throw MalformedMessage("no hello has come");
  }
  if (is_hello) {
    answer_hello(connection, request);
  } else if (request.operation == Request::Operation::session) {
    answer_session(connection, request);
  } else if (request.operation == Request::Operation::await_change) {
    await_change(connection, std::move(request));
  } else if (request.operation == Request::Operation::for_round) {
    serve_workers(connection, request);
  } else if (request.operation == Request::Operation::worker_call ||
             request.operation == Request::Operation::worker_gone) {
    answer_worker(connection, request);
  } else {
    answer_key(connection, request);
  }
}

void StoreServer::answer_key(Connection& connection, const Request& request) {
  const int64_t before = table_.last_change();
  std::string reply = encode(table_.apply(request));
  connection.output += reply;
  if (!connection.agent.empty()) {
    Session& session = sessions_.at(connection.agent);
    ++session.done;
    session.last_reply = std::move(reply);
  }
  if (table_.last_change() != before) tell_waiters(request.key);
}

void StoreServer::answer_session(Connection& connection,
                                 const Request& request) {
  const auto found = sessions_.find(request.key);
  const bool begins = request.number == 0;
  const bool is_known =
      found != sessions_.end() && (found->second.done == request.number ||
                                   found->second.done + 1 == request.number);
  const bool has_room =
      found != sessions_.end() || sessions_.size() < kMostSessions;
  if (request.key.empty() || !connection.agent.empty() ||
      (begins ? !has_room : !is_known)) {
    connection.output += encode(Reply{
        .kind = Reply::Kind::refused,
        .text = "the host of the store does not know this agent any more"});
    return;
  }
  if (found != sessions_.end() && found->second.connection) {
    drop(*found->second.connection);
  }
  const std::lock_guard lock(mutex_);
  Session& session = sessions_[request.key];
  if (begins) session = {};
  session.connection = connection.id;
  session.closed.reset();
  connection.agent = request.key;
  connection.output +=
      encode(Reply{.kind = Reply::Kind::number, .number = session.done});
  if (!begins && session.done == request.number) {
    connection.output += session.last_reply;
  }
}

void StoreServer::leave_session(const Connection& connection) {
  if (connection.agent.empty()) return;
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  Session& session = sessions_.at(connection.agent);
  session.connection.reset();
  if (is_end_of_process(connection.channel.fd(),
                        now - connection.heard > kLongSilence)) {
    session.closed = now;
  }
}

std::set<std::string> StoreServer::agents() {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  std::set<std::string> all;
  for (const auto& [agent, session] : sessions_) {
    if (session.closed && now - *session.closed > kUntilRejoined) {
      continue;
    }
    all.insert(agent);
  }
  return all;
}

void StoreServer::serve_workers(Connection& connection,
                                const Request& request) {
  leave_round(connection);
  // The workers of a round that is over are being stopped.
  if (!rounds_.empty() && request.number < rounds_.rbegin()->first) {
    connection.output +=
        encode(Reply{.kind = Reply::Kind::refused,
                     .text = "the workers' store of that round is gone"});
    return;
  }
  connection.round = request.number;
  rounds_[request.number].relays.insert(connection.id);
  connection.output += encode(Reply{});
}

void StoreServer::leave_round(Connection& connection) {
  if (!connection.round) return;
  const auto found = rounds_.find(*std::exchange(connection.round, {}));
  found->second.table.forget_relay(connection.id);
  found->second.relays.erase(connection.id);
  if (found->second.relays.empty()) rounds_.erase(found);
}

void StoreServer::answer_worker(Connection& connection,
                                const Request& request) {
  if (!connection.round) throw MalformedMessage("no round was named");
  WorkerTable& table = rounds_.at(*connection.round).table;
  const WorkerTable::Asker asker{connection.id,
                                 static_cast<uint64_t>(request.number)};
  if (request.operation == Request::Operation::worker_gone) {
    table.forget(asker);
    return;
  }
  for (const auto& [to, reply] :
       table.ask(asker, parse_worker_call(request.value))) {
    const bool is_own = to.relay == connection.id;
    Connection& relay = is_own ? connection : *connections_.at(to.relay);
    relay.output += encode(Reply{.kind = Reply::Kind::worker_reply,
                                 .text = bytes_of(reply),
                                 .number = static_cast<int64_t>(to.worker)});
    if (!is_own && !flush(relay)) closing_.insert(to.relay);
  }
  // Afterwards, as this ends the waits of a relay that is to be answered.
  for (const Id id : std::exchange(closing_, {})) drop(id);
}

void StoreServer::answer_hello(Connection& connection, const Request& request) {
  if (request.number != kStoreVersion) {
    connection.output +=
        encode(Reply{.kind = Reply::Kind::refused,
                     .text = "the host of the store is of another version"});
    return;
  }
  connection.is_stranger = false;
  connection.due.reset();  // flush() sets that of a member
  strangers_.erase(connection.id);
  connection.output += encode(Reply{});
}

void StoreServer::await_change(Connection& connection, Request request) {
  connection.awaited_keys = std::move(request.keys);
  bool has_changed = connection.awaited_keys.empty();
  for (const std::string& key : connection.awaited_keys) {
    has_changed = has_changed || table_.last_change_of(key) > request.number;
    waiters_[key].insert(connection.id);
  }
  if (has_changed) end_wait(connection);
}

void StoreServer::end_wait(Connection& connection) {
  if (connection.awaited_keys.empty()) return;
  for (const std::string& key : connection.awaited_keys) {
    const auto found = waiters_.find(key);
    if (found == waiters_.end()) continue;  // the key was named twice
    found->second.erase(connection.id);
    if (found->second.empty()) waiters_.erase(found);
  }
  connection.awaited_keys.clear();
  connection.output += encode(
      Reply{.kind = Reply::Kind::number, .number = table_.last_change()});
}

void StoreServer::tell_waiters(const std::string& key) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  for (const Id id : std::set<Id>(found->second)) {
    Connection& waiter = *connections_.at(id);
    end_wait(waiter);
    if (!flush(waiter)) drop(id);
  }
}

void StoreServer::set_due(Connection& connection) {
  if (connection.is_stranger) {
    // From its first byte on, however many come.
    if (!connection.due) connection.due = awake_.awake() + limits_.until_hello;
  } else if (connection.output.empty() && !connection.input.holds_part()) {
    connection.due.reset();
  } else if (!connection.due) {
    connection.due = awake_.awake() + limits_.message;
  }
  if (connection.due) {
    dated_.insert(connection.id);
  } else {
    dated_.erase(connection.id);
  }
}

void StoreServer::listen_again() {
  if (!ignored_until_ || *ignored_until_ > awake_.awake()) return;
  ignored_until_.reset();
  watch(listener_.get(), kListener, listener_events_, EPOLLIN);
}

void StoreServer::drop_overdue() {
  for (const Id id : std::set<Id>(dated_)) {
    if (*connections_.at(id)->due <= awake_.awake()) drop(id);
  }
}

}  // namespace lockstep::internal

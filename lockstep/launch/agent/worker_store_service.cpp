#include "lockstep/launch/agent/worker_store_service.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/base/packet_socket.h"
#include "lockstep/launch/nodes/store/store_message.h"
#include "lockstep/launch/watch/agent_socket.h"

namespace lockstep::internal {
namespace {

constexpr uint64_t kWorkerListener = 1;
constexpr uint64_t kStoreLine = 2;
constexpr uint64_t kRenewal = 3;
constexpr uint64_t kFirstClient = 4;
constexpr size_t kWorkerReadBytes = 16 << 10;
// How many calls of a client may be under way, and how many bytes may wait for
// the line, before no more is read from clients.
constexpr size_t kMostUnanswered = 64;
constexpr size_t kMostLineBytes = 1 << 20;
// How many bytes the replies may have that clients have not taken, with those
// that are under way, before each client may have one call under way only.
constexpr size_t kMostReplyBytes = 64 << 20;
// When there was no descriptor for a client.
constexpr std::chrono::milliseconds kRetryAccept{100};

}  // namespace

std::string WorkerStoreService::name_for(int round, int master_port) {
  return "lockstep-store/" + std::to_string(geteuid()) + "/" +
         std::to_string(getpid()) + "/" + AgentSocket::mark() + "/" +
         std::to_string(round) + "/" + std::to_string(master_port);
}

WorkerStoreService::WorkerStoreService(const std::string& name, int round,
                                       std::shared_ptr<StoreLine> line,
                                       bool is_renewed)
    : EpollServer("the workers' store"),
      listener_(listen_at(name, SocketKind::stream)),
      round_(round),
      line_is_renewed_(is_renewed),
      renewal_(make_event_fd("the workers' store")),
      line_(std::move(line)),
      next_id_(kFirstClient) {
  watch(listener_.get(), kWorkerListener, listener_events_, EPOLLIN);
  watch(renewal_.get(), kRenewal, renewal_events_, EPOLLIN);
  if (line_) begin_line();
  start();
}

void WorkerStoreService::renew(std::shared_ptr<StoreLine> line) {
  const std::lock_guard lock(mutex_);
  next_line_ = std::move(line);
  const uint64_t one = 1;
  [[maybe_unused]] auto ignored = ::write(renewal_.get(), &one, sizeof(one));
}

void WorkerStoreService::take_line() {
  if (!lost_) ignore(line_->fd());
  {
    const std::lock_guard lock(mutex_);
    uint64_t count = 0;
    [[maybe_unused]] auto ignored =
        ::read(renewal_.get(), &count, sizeof(count));
    line_ = std::move(next_line_);
  }
  lost_ = false;
  begin_line();
}

void WorkerStoreService::begin_line() {
  line_input_ = {};
  line_events_.reset();
  line_output_ = encode(
      Request{.operation = Request::Operation::for_round, .number = round_});
  watch(line_->fd(), kStoreLine, line_events_, EPOLLIN | EPOLLOUT);
  for (const auto& [id, client] : clients_) {
    for (const std::string& call : client->unanswered) pass_on(*client, call);
  }
}

void WorkerStoreService::give_up() noexcept {
  clients_.clear();
  listener_.reset();
}

void WorkerStoreService::serve_event(Id id, uint32_t events) {
  if (id == kWorkerListener) {
    accept_new();
  } else if (id == kRenewal) {
    take_line();
  } else if (id == kStoreLine) {
    serve_line();
  } else if (const auto found = clients_.find(id); found != clients_.end()) {
    const bool hung_up = (events & (EPOLLHUP | EPOLLERR)) != 0;
    if (hung_up && paused_.contains(id)) {
      ending_.insert(id);  // nobody waits for its replies any more
    } else {
      serve(*found->second);
    }
  }
  drop_ending();
}

void WorkerStoreService::accept_new() {
  if (!listener_) return;
  try {
    while (FileDescriptor socket = accept_from(listener_)) {
      if (!is_own_or_roots(socket)) continue;
      auto client = std::make_unique<Client>();
      client->id = next_id_++;
      client->socket = std::move(socket);
      await_events(*client, EPOLLIN);
      clients_.emplace(client->id, std::move(client));
    }
  } catch (const std::system_error&) {
    // No descriptor is left. The thread waits, so that it does not spin.
    std::this_thread::sleep_for(kRetryAccept);
  }
}

bool WorkerStoreService::may_ask(const Client& client) const {
  const size_t replies = output_bytes_ + unanswered_ * kMostWorkerMessageBytes;
  const size_t most = replies < kMostReplyBytes ? kMostUnanswered : 1;
  return client.unanswered.size() < most &&
         line_output_.size() <= kMostLineBytes;
}

void WorkerStoreService::serve(Client& client) {
  try {
    if (!answer_all(client)) ending_.insert(client.id);
  } catch (const MalformedMessage&) {
    ending_.insert(client.id);
  }
}

bool WorkerStoreService::answer_all(Client& client) {
  for (int reads = 0;; ++reads) {
    while (true) {
      if (!flush(client)) return false;
      // Nothing more is answered before the replies are taken.
      if (!client.output.empty()) return true;
      if (!may_ask(client)) {
        paused_.insert(client.id);
        await_events(client, 0);
        return true;
      }
      const auto message = client.input.take(kMostWorkerMessageBytes);
      if (!message) break;
      take_call(client, *message);
    }
    if (reads == kReadsAtOnce) return true;
    std::array<char, kWorkerReadBytes> bytes;
    const ssize_t got =
        recv(client.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    client.input.append({bytes.data(), static_cast<size_t>(got)});
  }
}

bool WorkerStoreService::flush(Client& client) {
  size_t sent = 0;
  while (sent < client.output.size()) {
    const ssize_t count =
        send(client.socket.get(), client.output.data() + sent,
             client.output.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EINTR) {
      break;
    } else {
      return false;
    }
  }
  client.output.erase(0, sent);
  output_bytes_ -= sent;
  const uint32_t wanted = client.output.empty() ? EPOLLIN : EPOLLOUT;
  const bool rests = client.output.empty() && paused_.contains(client.id);
  await_events(client, rests ? 0 : wanted);
  return true;
}

void WorkerStoreService::take_call(Client& client, const std::string& message) {
  // Also before it is passed on: at the host it would end the whole line.
  const WorkerCall call = parse_worker_call(message);
  if (line_) {
    client.unanswered.push_back(message);
    ++unanswered_;
    pass_on(client, message);
    return;
  }
  for (const auto& answer : table_.ask({0, client.id}, call)) {
    deliver(answer.to.worker, bytes_of(answer.reply));
  }
}

void WorkerStoreService::pass_on(const Client& client,
                                 const std::string& call) {
  send_line(encode(Request{.operation = Request::Operation::worker_call,
                           .value = call,
                           .number = static_cast<int64_t>(client.id)}));
}

void WorkerStoreService::deliver(Id to, const std::string& reply) {
  const auto found = clients_.find(to);
  if (found == clients_.end()) return;
  Client& client = *found->second;
  const size_t before = client.output.size();
  client.output += with_length(reply);
  output_bytes_ += client.output.size() - before;
  if (!flush(client)) ending_.insert(to);
}

void WorkerStoreService::serve_line() {
  if (lost_) return;
  try {
    std::set<Id> answered;
    for (int reads = 0; reads < kReadsAtOnce; ++reads) {
      std::string bytes;
      const auto progress = line_->read(bytes, kWorkerReadBytes);
      if (progress == StoreLine::Progress::closed) return lose_line();
      line_input_.append(bytes);
      while (const auto message = line_input_.take()) {
        const Reply reply = parse_reply(*message);
        if (reply.kind == Reply::Kind::refused) return lose_line();
        if (reply.kind != Reply::Kind::worker_reply) continue;  // to for_round
        const auto id = static_cast<Id>(reply.number);
        const auto found = clients_.find(id);
        if (found == clients_.end()) continue;
        auto& unanswered = found->second->unanswered;
        if (unanswered.empty()) throw MalformedMessage("no call was made");
        unanswered.pop_front();
        --unanswered_;
        deliver(id, reply.text);
      }
      if (progress != StoreLine::Progress::done) break;
    }
    flush_line();
  } catch (const MalformedMessage&) {
    return lose_line();
  }
  if (lost_ || line_output_.size() > kMostLineBytes) return;
  for (const Id id : std::exchange(paused_, {})) {
    const auto found = clients_.find(id);
    if (found != clients_.end() && !ending_.contains(id)) serve(*found->second);
  }
}

void WorkerStoreService::send_line(const std::string& message) {
  if (lost_) return;
  line_output_ += message;
  flush_line();
}

void WorkerStoreService::flush_line() {
  if (lost_) return;
  const auto progress = line_->write(line_output_);
  if (progress == StoreLine::Progress::closed) return lose_line();
  const uint32_t events = progress == StoreLine::Progress::wants_output
                              ? EPOLLIN | EPOLLOUT
                              : EPOLLIN;
  watch(line_->fd(), kStoreLine, line_events_, events);
}

void WorkerStoreService::lose_line() {
  if (lost_) return;
  lost_ = true;
  ignore(line_->fd());
  if (line_is_renewed_) return;
  listener_.reset();
  for (const auto& [id, client] : clients_) ending_.insert(id);
}

void WorkerStoreService::drop(Id id) {
  paused_.erase(id);
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  unanswered_ -= found->second->unanswered.size();
  output_bytes_ -= found->second->output.size();
  clients_.erase(found);
  if (line_) {
    send_line(encode(Request{.operation = Request::Operation::worker_gone,
                             .number = static_cast<int64_t>(id)}));
  } else {
    table_.forget({0, id});
  }
}

void WorkerStoreService::drop_ending() {
  while (!ending_.empty()) {
    const Id id = *ending_.begin();
    ending_.erase(ending_.begin());
    drop(id);
  }
}

}  // namespace lockstep::internal

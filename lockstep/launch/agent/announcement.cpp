#include "lockstep/launch/agent/announcement.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "lockstep/base/packet_socket.h"

namespace lockstep::internal {

Announcement::Announcement(const std::string& store_socket, int attempt,
                           int first, int most, GenerationNotice notice,
                           std::vector<int> given_up)
    : attempt_(attempt),
      most_(most),
      notice_(std::move(notice)),
      given_up_(std::move(given_up)),
      next_(first) {
  if (next_ > most_) return;
  socket_ = connect_to(store_socket, SocketKind::stream);
  if (!socket_) {
    throw WorkerStoreLost("the workers' store cannot be reached: " +
                          std::generic_category().message(errno));
  }
  if (given_up_.empty()) {
    ask();
    return;
  }
  asks_for_end_ = true;
  send({.operation = WorkerCall::Operation::check,
        .keys = {training_ended_key(attempt_)}});
}

void Announcement::send(const WorkerCall& call) {
  const std::string bytes = with_length(bytes_of(call));
  // The socket's buffer is empty, and takes more than one call.
  const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(),
                              MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(bytes.size())) {
    throw WorkerStoreLost("the workers' store takes no call");
  }
}

void Announcement::ask() {
  std::erase_if(notice_.places, [&](int place) {
    return std::ranges::count(given_up_, place) > 0;
  });
  if (none_is_left()) return;
  text_ = text_of(notice_);
  send({.operation = WorkerCall::Operation::compare_set,
        .key = generation_key(attempt_, next_),
        .value = text_});
}

Announcement::State Announcement::look() {
  while (next_ <= most_) {
    if (none_is_left()) return State::none_left;
    try {
      if (const auto message = input_.take()) {
        const WorkerReply reply = parse_worker_reply(*message);
        if (std::exchange(asks_for_end_, false)) {
          if (reply.kind == WorkerReply::Kind::done) return State::has_ended;
          ask();
          continue;
        }
        if (reply.kind != WorkerReply::Kind::value) {
          throw WorkerStoreLost("the workers' store takes no key: " +
                                reply.text);
        }
        if (reply.text == text_) return State::made;
        // Another node has announced this one.
        auto places = generation_notice_of(reply.text).places;
        if (!places.empty()) notice_.places = std::move(places);
        if (++next_ <= most_) ask();
        continue;
      }
    } catch (const MalformedMessage& error) {
      throw WorkerStoreLost(std::string("no store of workers answers: ") +
                            error.what());
    }
    std::array<char, 4096> bytes;
    const ssize_t got =
        ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      input_.append({bytes.data(), static_cast<size_t>(got)});
    } else if (got < 0 && errno == EAGAIN) {
      return State::asked;
    } else if (got == 0 || errno != EINTR) {
      throw WorkerStoreLost("the workers' store has closed the connection");
    }
  }
  return State::none_free;
}

std::vector<int> announce_earlier(WorkerStoreLink& store, int attempt, int last,
                                  const Deadline& deadline) {
  std::vector<int> places;
  // From the last one on, so that a rank that finds the first which it lacks
  // finds the others, too.
  for (int generation = last; generation > 0; --generation) {
    const WorkerReply reply =
        store.call({.operation = WorkerCall::Operation::compare_set,
                    .key = generation_key(attempt, generation),
                    .value = "a failure before the store was lost"},
                   deadline);
    if (reply.kind != WorkerReply::Kind::value) {
      throw WorkerStoreLost("the workers' store takes no key: " + reply.text);
    }
    // The last announcement knows those before it.
    if (places.empty()) places = generation_notice_of(reply.text).places;
  }
  return places;
}

}  // namespace lockstep::internal

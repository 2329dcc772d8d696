#include "lockstep/cli/doctor/nodes/link_listener.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

constexpr size_t kMostStrangers = 16;
constexpr int kBacklog = 64;

// Reads what comes, up to a time after the first bytes; false if nothing came.
struct Received {
  uint64_t bytes = 0;
  std::chrono::nanoseconds time{};
};

class StreamReader {
 public:
  explicit StreamReader(LinkStream& stream) : stream_(stream) {}

  // Reads for `time`, or until the end. Returns what came from the first read
  // that returned something to the last one.
  Received receive(std::chrono::milliseconds time, const Deadline& most) {
    using Clock = std::chrono::steady_clock;
    Received received;
    const Deadline deadline = Deadline::after(std::min(time, most.remaining()));
    const auto begin = Clock::now();
    while (!deadline.expired()) {
      const ssize_t came = ::read(stream_.fd(), room_.data(), room_.size());
      if (came > 0) {
        received.bytes += static_cast<uint64_t>(came);
        received.time = Clock::now() - begin;
      } else if (came == 0 || (errno != EAGAIN && errno != EINTR)) {
        ended_ = true;
        break;
      } else if (!stream_.await(POLLIN, deadline)) {
        break;
      }
    }
    if (!ended_) received.time = Clock::now() - begin;
    return received;
  }

  bool ended() const { return ended_; }

 private:
  LinkStream& stream_;
  std::vector<char> room_ = std::vector<char>(256 << 10);
  bool ended_ = false;
};

void answer_stream(LinkStream& stream, const Deadline& deadline) {
  StreamReader reader(stream);
  reader.receive(kStreamStart, deadline);
  const Received received = reader.receive(kStreamTime, deadline);
  stream.write_number(received.bytes, deadline);
  stream.write_number(static_cast<uint64_t>(received.time.count()), deadline);
  // If this side closed while bytes of the stream are under way, the kernel
  // would discard the answer at the other side.
  while (!reader.ended() && !deadline.expired()) {
    reader.receive(deadline.remaining(), deadline);
  }
}

}  // namespace

LinkListener::LinkListener(const std::string& reached_at, int nodes)
    : nodes_(nodes), token_(random_digits(kLinkTokenBytes)) {
  const auto address = resolve({reached_at, 0}).front();
  socket_ = bind_for_nodes({reached_at, 0}, address);
  if (!socket_ || ::listen(socket_.get(), kBacklog) != 0) {
    throw_errno("listening for the other nodes");
  }
  port_ = bound_address(socket_.get()).port();
  epoll_ = FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{.events = EPOLLIN, .data = {}};
  if (!epoll_ ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket_.get(), &event) != 0) {
    throw_errno("epoll for the other nodes");
  }
}

void LinkListener::accept_new() {
  // accept4() must not block if a connection is gone again.
  pollfd entry{socket_.get(), POLLIN, 0};
  while (poll(&entry, 1, 0) == 1) {
    FileDescriptor fd(::accept4(socket_.get(), nullptr, nullptr,
                                SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return;
    epoll_event event{.events = EPOLLIN, .data = {}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd.get(), &event);
    strangers_.push_back({std::move(fd)});
    if (strangers_.size() > kMostStrangers) strangers_.pop_front();
  }
}

bool LinkListener::hear(Stranger& stranger) {
  std::array<char, kLinkHelloBytes> room;
  const size_t missing = kLinkHelloBytes - stranger.sent.size();
  const ssize_t came = ::read(stranger.socket.get(), room.data(), missing);
  if (came < 0) return errno == EAGAIN || errno == EINTR;
  if (came == 0) return false;
  stranger.sent.append(room.data(), static_cast<size_t>(came));
  const std::string_view sent = stranger.sent;
  if (!kLinkGreeting.starts_with(sent.substr(0, kLinkGreeting.size()))) {
    return false;
  }
  if (sent.size() < kLinkHelloBytes) return true;
  if (!is_same_secret(sent.substr(kLinkGreeting.size(), kLinkTokenBytes),
                      token_)) {
    return false;
  }
  int rank = 0;
  for (const char digit : sent.substr(kLinkHelloBytes - kLinkRankBytes)) {
    rank = rank << 8 | static_cast<unsigned char>(digit);
  }
  if (rank < 0 || rank >= nodes_) return false;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stranger.socket.get(), nullptr);
  members_[rank] = std::move(stranger.socket);
  return false;
}

std::optional<LinkStream> LinkListener::take(int rank) {
  accept_new();
  std::deque<Stranger> left;
  for (auto& stranger : strangers_) {
    if (hear(stranger)) left.push_back(std::move(stranger));
  }
  strangers_ = std::move(left);
  const auto member = members_.find(rank);
  if (member == members_.end()) return std::nullopt;
  LinkStream stream(std::move(member->second));
  members_.erase(member);
  return stream;
}

void answer_link(LinkStream stream) {
  const Deadline deadline = Deadline::after(kMostLinkTime);
  if (!stream.write_all({&kLinkReady, 1}, deadline)) return;
  char question = 0;
  for (int asked = 0; asked <= kMostPings; ++asked) {
    if (!stream.read_all(&question, 1, deadline)) return;
    if (question == kLinkStream) return answer_stream(stream, deadline);
    if (question != kLinkPing ||
        !stream.write_number(static_cast<uint64_t>(host_clock_ns()),
                             deadline)) {
      return;
    }
  }
}

}  // namespace lockstep::internal

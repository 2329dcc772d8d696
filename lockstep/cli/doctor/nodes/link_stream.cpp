#include "lockstep/cli/doctor/nodes/link_stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <ctime>

namespace lockstep::internal {

LinkStream::LinkStream(FileDescriptor socket) : socket_(std::move(socket)) {
  const int on = 1;
  setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // Bytes that wait in this host's socket would be sent long after the stream
  // was measured if the link is slow.
  const int unsent = 64 << 10;
  setsockopt(fd(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
}

bool LinkStream::await(short events, const Deadline& deadline) {
  while (true) {
    pollfd entry{fd(), events, 0};
    const int ready =
        poll(&entry, 1, static_cast<int>(deadline.remaining().count()));
    if (ready > 0) return true;
    if (deadline.expired() || (ready < 0 && errno != EINTR)) return false;
  }
}

bool LinkStream::read_all(char* bytes, size_t count, const Deadline& deadline) {
  while (count > 0) {
    const ssize_t came = ::read(fd(), bytes, count);
    if (came > 0) {
      bytes += came;
      count -= static_cast<size_t>(came);
    } else if (came == 0 || (errno != EAGAIN && errno != EINTR) ||
               !await(POLLIN, deadline)) {
      return false;
    }
  }
  return true;
}

bool LinkStream::write_all(std::string_view bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const ssize_t went = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (went > 0) {
      bytes.remove_prefix(static_cast<size_t>(went));
    } else if ((errno != EAGAIN && errno != EINTR) ||
               !await(POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool LinkStream::read_number(uint64_t& number, const Deadline& deadline) {
  std::array<char, 8> bytes;
  if (!read_all(bytes.data(), bytes.size(), deadline)) return false;
  number = 0;
  for (const char byte : bytes) {
    number = number << 8 | static_cast<unsigned char>(byte);
  }
  return true;
}

bool LinkStream::write_number(uint64_t number, const Deadline& deadline) {
  std::array<char, 8> bytes;
  for (size_t at = bytes.size(); at-- > 0; number >>= 8) {
    bytes[at] = static_cast<char>(number & 0xff);
  }
  return write_all({bytes.data(), bytes.size()}, deadline);
}

int64_t host_clock_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace lockstep::internal

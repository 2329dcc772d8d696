#include "lockstep/base/packet_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace lockstep::internal {
namespace {

// More than there are ranks, so that strangers in the queue do not keep ranks
// out.
constexpr int kBacklog = 512;

FileDescriptor open_socket(SocketKind kind) {
  const int type = kind == SocketKind::packets ? SOCK_SEQPACKET : SOCK_STREAM;
  return FileDescriptor(
      ::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

struct Address {
  sockaddr_un at;
  socklen_t bytes;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }
};

Address abstract_address(const std::string& name) {
  Address address{.at = {.sun_family = AF_UNIX, .sun_path = {}}, .bytes = 0};
  if (name.empty() || name.size() + 1 > sizeof address.at.sun_path) {
    throw std::invalid_argument("\"" + name +
                                "\" cannot be the name of a socket");
  }
  std::memcpy(address.at.sun_path + 1, name.data(), name.size());
  address.bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

}  // namespace

FileDescriptor listen_at(const std::string& name, SocketKind kind) {
  const auto address = abstract_address(name);
  auto socket = open_socket(kind);
  if (!socket) throw_errno("could not make a Unix socket");
  if (::bind(socket.get(), address.get(), address.bytes) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    throw_errno("could not listen on an abstract Unix socket");
  }
  return socket;
}

FileDescriptor accept_from(const FileDescriptor& listener) {
  for (;;) {
    FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr,
                                    SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket || errno == EAGAIN) return socket;
    if (errno != EINTR && errno != ECONNABORTED) {
      throw_errno("could not accept a Unix socket");
    }
  }
}

FileDescriptor connect_to(const std::string& name, SocketKind kind) {
  const auto address = abstract_address(name);
  auto socket = open_socket(kind);
  if (!socket) return socket;
  if (::connect(socket.get(), address.get(), address.bytes) == 0) return socket;
  const int error = errno;
  socket.reset();
  errno = error;
  return socket;
}

ucred peer_of(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    throw_errno("could not get the user at the other end of a Unix socket");
  }
  return peer;
}

uid_t user_of_peer(const FileDescriptor& socket) { return peer_of(socket).uid; }

bool is_own_or_roots(const FileDescriptor& socket) {
  const uid_t user = user_of_peer(socket);
  return user == ::geteuid() || user == 0;
}

Sent send_packet(const FileDescriptor& socket, std::span<const std::byte> bytes,
                 int descriptor) {
  iovec data{.iov_base = const_cast<std::byte*>(bytes.data()),
             .iov_len = bytes.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    auto* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  for (;;) {
    if (::sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
      return Sent::all;
    }
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
      case ENOBUFS:
      case ETOOMANYREFS:  // descriptors that are on their way
        return Sent::full;
      case EPIPE:
      case ECONNRESET:
      case ENOTCONN:
        return Sent::hung_up;
      default:
        throw_errno("could not send to a peer");
    }
  }
}

Packet receive_packet(const FileDescriptor& socket,
                      std::span<std::byte> bytes) {
  Packet packet{.state = Packet::State::none,
                .bytes = 0,
                .descriptor = {},
                .descriptor_lost = false};
  iovec data{.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  ssize_t received = 0;
  for (;;) {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    received = ::recvmsg(socket.get(), &message,
                         MSG_DONTWAIT | MSG_CMSG_CLOEXEC | MSG_TRUNC);
    if (received >= 0) break;
    if (errno == EAGAIN) return packet;
    // ECONNRESET is reported once, before the packets that came earlier.
    if (errno != EINTR && errno != ECONNRESET) {
      throw_errno("could not receive from a peer");
    }
  }
  packet.descriptor_lost = (message.msg_flags & MSG_CTRUNC) != 0;
  for (auto* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    // The padding has room for a second descriptor; each one must get an owner.
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int),
                  sizeof descriptor);
      if (packet.descriptor) packet.descriptor_lost = true;
      packet.descriptor = FileDescriptor(descriptor);
    }
  }
  packet.bytes = static_cast<size_t>(received);
  packet.state =
      received == 0 ? Packet::State::hung_up : Packet::State::received;
  return packet;
}

}  // namespace lockstep::internal

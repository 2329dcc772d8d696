#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "lockstep/base/file_descriptor.h"

// Sockets that carry short packets and descriptors between processes of one
// host (unix(7), SOCK_SEQPACKET, abstract names), or bytes (SOCK_STREAM). None
// of these calls blocks; all descriptors are closed on exec. Threads: any, if
// only one thread at a time sends on a socket, and only one receives.
namespace lockstep::internal {

enum class SocketKind { packets, stream };

// Listens at `name`, which is without the zero byte that makes it abstract.
// Throws std::system_error.
FileDescriptor listen_at(const std::string& name,
                         SocketKind kind = SocketKind::packets);

// Returns the next connection, or an empty descriptor if there is none. Throws
// std::system_error.
FileDescriptor accept_from(const FileDescriptor& listener);

// Connects to `name`. If it cannot, returns an empty descriptor and sets errno:
// EAGAIN while too many wait to be accepted, ECONNREFUSED if no process
// listens.
FileDescriptor connect_to(const std::string& name,
                          SocketKind kind = SocketKind::packets);

// Returns the process, and the effective user and group, of the other end when
// it connected or began to listen. Throws std::system_error.
ucred peer_of(const FileDescriptor& socket);
uid_t user_of_peer(const FileDescriptor& socket);
// Returns whether that user is this process's own, or root. No other may be
// believed: any user may take the name of a process that has ended.
bool is_own_or_roots(const FileDescriptor& socket);

enum class Sent { all, full, hung_up };
// Sends one packet, and `descriptor` with it unless that is -1. If it returns
// `full`, nothing was sent: try again later. Throws std::system_error.
Sent send_packet(const FileDescriptor& socket, std::span<const std::byte> bytes,
                 int descriptor = -1);

struct Packet {
  enum class State { none, received, hung_up };
  State state;
  size_t bytes;  // of the whole packet, even if it did not fit
  FileDescriptor descriptor{};
  // A descriptor came for which this process had no room, or more than one.
  bool descriptor_lost;
};
// Receives the next packet into `bytes`, if one has come. Returns `hung_up`
// only after the last packet. Throws std::system_error.
Packet receive_packet(const FileDescriptor& socket, std::span<std::byte> bytes);

}  // namespace lockstep::internal

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "lockstep/base/file_descriptor.h"

// Sockets that carry short packets and descriptors between processes of one
// host (unix(7), SOCK_SEQPACKET, abstract names). None of these calls blocks;
// all descriptors are closed on exec. Threads: any, as far as one socket is
// used by one thread for each direction.
namespace lockstep::shm {

// The name is without the zero byte that makes it abstract. Throws
// std::system_error.
FileDescriptor listen_at(const std::string& name);

// Who has connected, or nothing. Throws std::system_error.
FileDescriptor accept_from(const FileDescriptor& listener);

// Empty, with errno, if it cannot: EAGAIN while too many wait to be accepted,
// ECONNREFUSED if nobody listens.
FileDescriptor connect_to(const std::string& name);

// The effective user of the other end when it connected or began to listen.
// Throws std::system_error.
uid_t user_of_peer(const FileDescriptor& socket);

enum class Sent { all, full, hung_up };
// `descriptor`: what to hand over as well, or -1. `full`: nothing was sent, to
// be tried again. Throws std::system_error.
Sent send_packet(const FileDescriptor& socket, std::span<const std::byte> bytes,
                 int descriptor = -1);

struct Packet {
  enum class State { none, received, hung_up };
  State state;
  size_t bytes;  // more than fitted if the packet was longer
  FileDescriptor descriptor{};
  // Descriptors came that this process has no room for, or more than one.
  bool descriptor_lost;
};
// What has come by now, into `bytes`. `hung_up` after the last packet only.
// Throws std::system_error.
Packet receive_packet(const FileDescriptor& socket, std::span<std::byte> bytes);

}  // namespace lockstep::shm

#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/packet_socket.h"

namespace lockstep::internal::testing {

// Returns a TCP port on which nobody listens, for a program that a test starts.
// No other test gets it while this process lives: an abstract socket reserves
// it. It lies below the ports that the kernel gives to outgoing connections,
// since one of these could have it before the program binds it.
inline int free_port() {
  static std::vector<FileDescriptor> reserved;
  static std::random_device random;
  for (int tries = 0; tries < 1000; ++tries) {
    const int port = static_cast<int>(10'000 + random() % 20'000);
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = htons(static_cast<uint16_t>(port));
    const FileDescriptor probe(
        ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    try {
      auto reservation =
          listen_at("lockstep-test-port-" + std::to_string(port));
      if (::bind(probe.get(), reinterpret_cast<const sockaddr*>(&any),
                 sizeof(any)) == 0) {
        reserved.push_back(std::move(reservation));
        return port;
      }
    } catch (const std::system_error&) {  // another test has it
    }
  }
  throw std::runtime_error("no port is free");
}

}  // namespace lockstep::internal::testing

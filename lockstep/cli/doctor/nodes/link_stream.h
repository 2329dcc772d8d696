#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The messages between two nodes while their link is measured
// (docs/internals/doctor.md). The node that connects asks, the one that has
// accepted answers. All numbers are big-endian.
inline constexpr std::string_view kLinkGreeting = "lockstep link 1 ";
inline constexpr size_t kLinkTokenBytes = 32;  // of the node that listens
inline constexpr size_t kLinkRankBytes = 4;    // of the node that connects
inline constexpr size_t kLinkHelloBytes =
    kLinkGreeting.size() + kLinkTokenBytes + kLinkRankBytes;
inline constexpr char kLinkReady = 'r';   // answers the hello
inline constexpr char kLinkPing = 'p';    // is answered by 8 bytes: the time
inline constexpr char kLinkStream = 's';  // bytes of any value follow, which
// are answered by 16 bytes: how many came, and in how many nanoseconds.

// How long a stream is received before it is measured, as TCP starts slowly,
// and how long it is measured.
inline constexpr std::chrono::milliseconds kStreamStart{150};
inline constexpr std::chrono::milliseconds kStreamTime{400};
// The time that one connection may take at most, whatever the other node does.
inline constexpr std::chrono::milliseconds kMostLinkTime{8000};
inline constexpr int kMostPings = 200;

// One such connection. For one thread; every call ends at its deadline.
class LinkStream {
 public:
  // `socket` is connected and does not block.
  explicit LinkStream(FileDescriptor socket);

  int fd() const { return socket_.get(); }
  // Both return false if the other side has closed, or not all bytes went
  // before the deadline.
  bool read_all(char* bytes, size_t count, const Deadline& deadline);
  bool write_all(std::string_view bytes, const Deadline& deadline);
  bool read_number(uint64_t& number, const Deadline& deadline);
  bool write_number(uint64_t number, const Deadline& deadline);
  // Waits until `events` of poll() have come; false after the deadline.
  bool await(short events, const Deadline& deadline);

 private:
  FileDescriptor socket_;
};

// Nanoseconds since 1970 of this host's clock.
int64_t host_clock_ns();

}  // namespace lockstep::internal

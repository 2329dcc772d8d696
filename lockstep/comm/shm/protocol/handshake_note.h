#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/packet_socket.h"

// The message of ranks to each other in the handshake (handshake.h). Both ends
// are on one host, so there is no byte order to care about.
namespace lockstep::internal::shm {

inline constexpr uint32_t kHandshakeMagic = 0x4d48534c;  // "LSHM"
inline constexpr uint32_t kHandshakeVersion = 1;

enum class Kind : uint32_t {
  hello = 1,    // both ways, first on each connection
  memory,       // from rank 0: tuning, and the segment's descriptor
  mapped,       // to rank 0: this rank has it, and is connected to all
  go,           // from rank 0: all ranks have said `mapped`
  unavailable,  // from here on: failures with their text, to and from rank 0
  broken,
  invalid,
};

// 128 random bits in hexadecimal.
using Secret = std::array<char, 32>;

struct Note {
  uint32_t magic;
  uint32_t version;
  Secret secret;
  Kind kind;
  int32_t rank;
  int32_t size;
  uint32_t pid;
  uint64_t one_shot_bytes;
  uint64_t chunk_bytes;
  uint64_t streaming_bytes;
  std::array<char, 1024> text;  // ends with 0
};

// A failure that ends the meeting for every rank. Thrown within the handshake
// only.
struct Failure {
  Kind kind;
  std::string text;
};

// Throws the failure as the exception that callers know: Unavailable,
// GroupBroken or std::invalid_argument.
[[noreturn]] void throw_error(const Failure& failure);

// Turns a failure into the value of a key of the store, and back; failure_in()
// returns nothing if `value` is not a failure.
std::string store_value(const Failure& failure);
std::optional<Failure> failure_in(const std::string& value);

// Returns whether the packet holds one note, of this version and with this
// secret.
bool is_genuine(const Packet& packet, const Note& note,
                const std::string& secret);

}  // namespace lockstep::internal::shm

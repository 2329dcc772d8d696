#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// The messages between an agent and the agents' store, byte by byte in
// docs/launcher.md, "The store's messages". An agent sends requests; the store
// answers each with one reply, in order.

// A message is never longer than this, and nothing is allocated for one that
// says that it is.
inline constexpr size_t kMostMessageBytes = 64 << 10;
inline constexpr size_t kMostKeyBytes = 255;
inline constexpr size_t kMostValueBytes = 60'000;
inline constexpr size_t kMostAwaitedKeys = 8;
inline constexpr int64_t kStoreVersion = 1;

// Thrown for bytes that are no message of this protocol. The connection on
// which they came must be closed.
class MalformedMessage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Request {
  enum class Operation : uint8_t {
    hello = 1,          // the first on each connection; number: kStoreVersion
    set = 2,            // key, value
    get = 3,            // key
    add = 4,            // key, number
    remove = 5,         // key
    set_if_absent = 6,  // key, value
    // Answered once one of `keys` has changed after change `number`, or once
    // the next request of the connection comes.
    await_change = 7,
  };
  Operation operation = Operation::hello;
  std::string key{};
  std::string value{};
  int64_t number = 0;
  std::vector<std::string> keys{};

  bool operator==(const Request&) const = default;
};

struct Reply {
  enum class Kind : uint8_t {
    done = 0,     // nothing to tell; for get: there is no value
    text = 1,     // a value
    number = 2,   // add: the sum; await_change: the number of the last change
    refused = 3,  // text says why; the request had no effect
  };
  Kind kind = Kind::done;
  std::string text{};
  int64_t number = 0;

  bool operator==(const Reply&) const = default;
};

// Both return the bytes of a message with its length before them. They require
// keys and values within the limits above.
std::string encode(const Request& request);
std::string encode(const Reply& reply);

// Parse what MessageBuffer::take() returns. Both throw MalformedMessage.
Request parse_request(std::string_view bytes);
Reply parse_reply(std::string_view bytes);

// Cuts the bytes of one connection into messages. Holds at most one message and
// what was appended at once.
class MessageBuffer {
 public:
  void append(std::string_view bytes) { bytes_ += bytes; }
  // Returns the next message, without its length, once it is complete. Throws
  // MalformedMessage as soon as a length is known to be 0 or above `most`.
  std::optional<std::string> take(size_t most = kMostMessageBytes);
  // Returns whether a part of a message is there.
  bool holds_part() const { return !bytes_.empty(); }

 private:
  std::string bytes_;
};

}  // namespace lockstep::internal

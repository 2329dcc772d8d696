#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/message_bytes.h"

namespace lockstep::internal {

// The messages between a worker and the store that its launcher keeps for the
// workers of an attempt, byte by byte in docs/internals/launcher.md, "The
// workers' store". A worker makes calls on a connection to the Unix socket that
// LOCKSTEP_STORE names; each gets one reply, in order. What the operations do
// to keys is what c10d::Store says.

// A message of a worker fits into one of the agents' store, with room for what
// is put around it.
inline constexpr size_t kMostWorkerMessageBytes = kMostMessageBytes - 64;
inline constexpr size_t kMostWorkerKeyBytes = 4096;
inline constexpr size_t kMostWorkerValueBytes = 120 << 10;

struct WorkerCall {
  enum class Operation : uint8_t {
    set = 1,          // key, value
    get = 2,          // key; does not wait
    add = 3,          // key, number
    compare_set = 4,  // key, expected, value
    remove = 5,       // key
    check = 6,        // keys: are all set?
    // Answered once all of `keys` are set, or once the connection's next call
    // comes, whose reply then is the second one.
    wait = 7,
    count_keys = 8,
    append = 9,  // key, value
    // Takes the place `key` in the name of `value` until this connection is
    // closed; the reply counts how often the place was taken. Refused while a
    // connection has the place in another name: the reply has that name.
    claim = 10,
  };
  Operation operation = Operation::get;
  std::string key{};
  std::string value{};
  std::string expected{};
  int64_t number = 0;
  std::vector<std::string> keys{};

  bool operator==(const WorkerCall&) const = default;
};

struct WorkerReply {
  enum class Kind : uint8_t {
    done = 0,    // for wait and check: all keys are set
    value = 1,   // text: the value
    number = 2,  // add: the sum; remove: 1 if there was a key; count_keys;
                 // append: the bytes of the value; claim: the count
    absent = 3,  // get: there is no such key; check: not all keys are set
    ended = 4,   // wait: the next call came first
    // The call had no effect; text says why, or which name has the place.
    refused = 5,
  };
  Kind kind = Kind::done;
  std::string text{};
  int64_t number = 0;

  bool operator==(const WorkerReply&) const = default;
};

// Both return the bytes of a message without its length. They require keys and
// values within the limits above and, for several keys, that the message is.
std::string bytes_of(const WorkerCall& call);
std::string bytes_of(const WorkerReply& reply);

// Both throw MalformedMessage.
WorkerCall parse_worker_call(std::string_view message);
WorkerReply parse_worker_reply(std::string_view message);

}  // namespace lockstep::internal

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/message_bytes.h"

namespace lockstep::internal {

// The messages between an agent and the agents' store, byte by byte in
// docs/internals/launcher.md, "The store's messages". An agent sends requests;
// the store answers each with one reply, in order; except worker_call and
// worker_gone.

inline constexpr size_t kMostKeyBytes = 255;
inline constexpr size_t kMostValueBytes = 60'000;
inline constexpr size_t kMostAwaitedKeys = 8;
inline constexpr int64_t kStoreVersion = 3;

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
    // The next three are for the workers' store (worker/worker_call.h). From
    // now on this connection makes calls of workers in round `number`.
    for_round = 8,
    // A worker's connection of number `number`, at the agent that sends this,
    // makes the call `value`. Answered by worker_reply, maybe later.
    worker_call = 9,
    // The worker's connection `number` is closed. Not answered.
    worker_gone = 10,
    // From now on this connection is the one of the agent `key`; an earlier one
    // is closed. `number` is how many requests the agent has sent before, from
    // set to set_if_absent; 0 when it begins. Answered by the number of those
    // that were done. If that is all, the reply to the last one follows once
    // more.
    session = 11,
  };
  Operation operation = Operation::hello;
  std::string key{};
  std::string value{};  // of worker_call: a message of worker_call.h
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
    // To the worker's connection `number`: text is a message of worker_call.h.
    worker_reply = 4,
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

}  // namespace lockstep::internal

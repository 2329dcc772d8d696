#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

namespace lockstep {

// The key-value store through which the agents of a job's nodes agree
// (docs/launcher.md, "Between the nodes"). One agent hosts it; keys live as
// long as that agent. Operations are atomic for all agents.
//
// An object is one connection, used by one thread at a time. An operation
// blocks for a round trip to the host; one whose answer does not come throws
// once the connection is shut (shut_connections_to(), endpoint.h). Every
// operation throws AgentStoreError where the connection is broken.
class AgentStore {
 public:
  virtual ~AgentStore() = default;

  // `value` is not empty.
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Nothing where the key was never set.
  virtual std::optional<std::string> get(const std::string& key) = 0;
  virtual bool check(const std::string& key) = 0;
  // Adds to a counter, which begins at 0; returns its new value.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Makes `key` one that was never set.
  virtual void remove(const std::string& key) = 0;
  // Sets `key` to `value`, not empty, where it was never set. Returns what the
  // key then holds.
  virtual std::string set_if_absent(const std::string& key,
                                    const std::string& value) = 0;
};

// The connection to the store's host is broken, or was never made.
class AgentStoreError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How an implementation reaches its host.
struct AgentStoreAddress {
  std::string host{};  // a numeric address
  uint16_t port = 0;
  // A socket that listens at `host` and `port`: then the store is hosted here
  // and takes the socket over; -1 to connect to a host elsewhere.
  int listen_fd = -1;
  std::chrono::milliseconds timeout{};  // to connect
};

// What a store module exports, as "lockstep_open_agent_store" of C linkage.
// The caller owns the result. Throws AgentStoreError.
using OpenAgentStore = AgentStore* (*)(const AgentStoreAddress& address);
inline constexpr const char* kOpenAgentStore = "lockstep_open_agent_store";

// Opens a store by the module that speaks to c10d's TCPStore. The module lies
// in ../lib/lockstep beside the folder of this program, or where
// LOCKSTEP_MODULE_PATH says, and is loaded by the first call, which brings
// LibTorch into the process (0.3 s). Throws std::runtime_error of one line
// where there is no such module, AgentStoreError where no store is reached.
std::unique_ptr<AgentStore> open_c10d_store(const AgentStoreAddress& address);

}  // namespace lockstep

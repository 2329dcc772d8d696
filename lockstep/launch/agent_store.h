#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

// The key-value store through which the agents of a job's nodes agree
// (docs/launcher.md, "Between the nodes"). One agent hosts it; keys live as
// long as that agent. Operations are atomic for all agents.
//
// An object is one connection, for one thread at a time. An operation blocks
// for one round trip to the host; if no answer comes, until the connection is
// shut (shut_connections_to(), store_connections.h). Every operation throws
// AgentStoreError if the connection is broken.
class AgentStore {
 public:
  virtual ~AgentStore() = default;

  // `value` must not be empty.
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Returns nothing if the key was never set.
  virtual std::optional<std::string> get(const std::string& key) = 0;
  virtual bool check(const std::string& key) = 0;
  // Adds to a counter, which begins at 0; returns its new value.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Removes `key`, as if it had never been set.
  virtual void remove(const std::string& key) = 0;
  // Sets `key` to `value`, which must not be empty, if the key was never set.
  // Returns what the key holds then.
  virtual std::string set_if_absent(const std::string& key,
                                    const std::string& value) = 0;
};

// The connection to the store's host is broken, or was never made.
class AgentStoreError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How an AgentStore reaches its host.
struct AgentStoreAddress {
  std::string host{};  // a numeric address
  uint16_t port = 0;
  // A socket that listens at `host` and `port`: the store is then hosted in
  // this process and takes the socket over. -1: connect to a host elsewhere.
  int listen_fd = -1;
  std::chrono::milliseconds timeout{};  // to connect
};

// The function that a store module exports, with C linkage, as
// "lockstep_open_agent_store". The caller owns the result. Throws
// AgentStoreError.
using OpenAgentStore = AgentStore* (*)(const AgentStoreAddress& address);
inline constexpr const char* kOpenAgentStore = "lockstep_open_agent_store";

// Opens a store through the module that uses c10d's TCPStore. The module lies
// in ../lib/lockstep beside the folder of this program, or in the folder that
// LOCKSTEP_MODULE_PATH names. The first call loads it, which brings LibTorch
// into the process (0.3 s). Throws std::runtime_error of one line if there is
// no such module, AgentStoreError if no store is reached.
std::unique_ptr<AgentStore> open_c10d_store(const AgentStoreAddress& address);

}  // namespace lockstep::internal

#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep::internal {

class Deadline;  // base's headers are not for the module c10d_store

// A connection to the agents' store that is ready for messages: hands are
// shaken, and the hello was answered. For one thread. No call blocks.
class StoreLine {
 public:
  enum class Progress {
    done,
    wants_input,   // call again when fd() is readable
    wants_output,  // call again when fd() is writable
    closed,        // by the other side, or broken
  };

  virtual ~StoreLine() = default;
  virtual int fd() const = 0;
  // Reads up to `most` bytes and appends them to `bytes`.
  virtual Progress read(std::string& bytes, size_t most) = 0;
  // Removes from `bytes` what was written; `done`: all was.
  virtual Progress write(std::string& bytes) = 0;
};

// The key-value store through which the agents of a job's nodes agree
// (docs/internals/launcher.md, "Between the nodes"). One agent hosts it; keys
// live as long as that agent. Operations are atomic for all agents.
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
  // Returns once one of `keys` has changed since the last call returned, and at
  // the latest after `allowed` or when the descriptor `wake_fd` is readable.
  // May return early. `keys` holds from one to eight. This is for a store that
  // cannot tell what has changed: it returns after 50 ms.
  virtual void await_change(const std::vector<std::string>& keys,
                            std::chrono::milliseconds allowed, int wake_fd) {
    static_cast<void>(keys);
    pollfd entry{wake_fd, POLLIN, 0};
    poll(&entry, 1,
         static_cast<int>(
             std::min(allowed, std::chrono::milliseconds(50)).count()));
  }
  // Returns one more connection to the same store, for the calls of workers
  // (worker_store_service.h). Blocks until `deadline` at most. Null if this
  // kind of store takes none.
  virtual std::unique_ptr<StoreLine> open_line(const Deadline& deadline) {
    static_cast<void>(deadline);
    return nullptr;
  }
  // Whether this kind of store knows its agents (Rejoining::agent).
  virtual bool knows_agents() const { return false; }
  // Returns, on the host of a store that knows its agents, those whose
  // connection is open, or broke in such a way that the agent may live and
  // rejoin.
  virtual std::set<std::string> agents() { return {}; }
};

// The connection to the store's host is broken, or was never made.
class AgentStoreError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The process that listens at the endpoint does not know this agent's secret.
class AgentStoreRefused : public AgentStoreError {
 public:
  using AgentStoreError::AgentStoreError;
};

// The process that listens at the endpoint closes connections, or says what no
// agents' store says.
class AgentStoreStranger : public AgentStoreError {
 public:
  using AgentStoreError::AgentStoreError;
};

// How an agent rejoins the store if its connection breaks while both hosts
// live. An operation under way then blocks, and goes on once the agent has
// connected again; it is done once. The store's client asks and tells in the
// thread that called the operation:
//
//   whole --connection breaks--> broken --connected again--> whole
//                                  |
//                                  +--given_up(), the store's process has
//                                     ended, or its host does not know the
//                                     agent--> AgentStoreError
struct Rejoining {
  std::string agent{};  // distinguishes this agent from all others
  // Asked before each try.
  std::function<bool()> given_up{};
  // Called when the first try has failed, with the reason, and when the agent
  // is back after that.
  std::function<void(const std::string& why)> broken{};
  std::function<void()> back{};
};

// How an AgentStore reaches its host.
struct AgentStoreAddress {
  std::string host{};  // a numeric address
  uint16_t port = 0;
  // A socket that listens at `host` and `port`: the store is then hosted in
  // this process and takes the socket over. -1 means to connect to a host
  // elsewhere.
  int listen_fd = -1;
  std::chrono::milliseconds timeout{};  // to connect
  // The secret that all agents of the job know, and prove to each other to
  // know. If it is nothing, they prove nothing.
  std::optional<std::string> secret{};
  // If it is nothing, a connection that breaks is lost. Only our own store can
  // do more.
  std::optional<Rejoining> rejoining{};
};

// The function that a store module exports, with C linkage, as
// "lockstep_open_agent_store". The caller owns the result. Throws
// AgentStoreError.
using OpenAgentStore = AgentStore* (*)(const AgentStoreAddress& address);
inline constexpr const char* kOpenAgentStore = "lockstep_open_agent_store";

// Open a store through a module: open_lockstep_store() ours (StoreServer),
// whose module links OpenSSL; open_c10d_store() c10d's TCPStore, which knows no
// secret and whose module brings LibTorch into the process (0.3 s). A module
// lies in
// ../lib/lockstep beside the folder of this program, or in the folder that
// LOCKSTEP_MODULE_PATH names. The first call loads it. Throw std::runtime_error
// of one line if there is no such module, AgentStoreError if no store is
// reached.
std::unique_ptr<AgentStore> open_lockstep_store(
    const AgentStoreAddress& address);
std::unique_ptr<AgentStore> open_c10d_store(const AgentStoreAddress& address);

// Thrown if the store holds a record that no agent of this version wrote.
class ForeignRecord : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep::internal

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"
#include "lockstep/launch/nodes/agent_store.h"

namespace lockstep::internal {

struct StoreConnectorOptions {
  Endpoint endpoint{};  // of the agents' store
  // Whether this agent hosts the store. If it is unset, it does if the endpoint
  // is an address of this host and no process listens there yet; of several
  // agents on that host the first one does.
  std::optional<bool> is_host{};
  std::chrono::milliseconds timeout{600'000};  // to reach the store
  // Opens the store at an address; AgentStoreAddress::secret is `secret`.
  std::function<std::unique_ptr<AgentStore>(const AgentStoreAddress&)> open =
      open_lockstep_store;
  std::optional<std::string> secret{};
  std::optional<Rejoining> rejoining{};  // AgentStoreAddress::rejoining
  // Whether the store existed before: if its host refuses connections for 3
  // s, it does not come again.
  bool was_there = false;
};

struct OpenedStore {
  std::unique_ptr<AgentStore> store{};
  bool hosted = false;           // by this agent
  bool beyond_loopback = false;  // hosted, and reachable from other hosts
  // The address by which the other nodes reach this host: the one from which it
  // speaks to the store. Empty if this agent or another one on this host hosts
  // the store: then each node reaches this host by the endpoint that it was
  // given itself.
  std::string reachable_host{};
  // Which node hosts the store, and on which interface, for messages: "this
  // node hosts the agents' store on every interface; 192.0.2.1 is on eth0".
  std::string hosting{};
};

// Opens the store of a job: binds the endpoint and hosts the store, or waits
// until another agent does and connects to it. Names and hosts that do not
// exist yet are tried again, as nodes start in any order and a name server may
// learn of them late.
class StoreConnector {
 public:
  // Called with a line for the user when the wait gets long.
  using Notice = std::function<void(const std::string& text)>;

  explicit StoreConnector(StoreConnectorOptions options)
      : options_(std::move(options)) {}

  // Blocks for at most `timeout` (and one look-up of the resolver). Gives up
  // early if `cancelled` returns true; it is asked ten times a second and once
  // for each address. A store that accepts a connection but does not answer
  // blocks this call until the connection is shut (shut_connections_to()).
  // Throws AgentStoreError, one line with the endpoint and the reason;
  // std::invalid_argument if this agent must host the store and cannot, or if
  // another process has used the port of this host for 3 s and accepts no
  // connections there, or for 10 s and is not an agents' store, or if the host
  // has had another secret for 10 s (before, it may be the store of a job that
  // is ending). A process that accepts connections and says nothing may be a
  // store whose agent is stopped, and is waited for.
  OpenedStore open(const std::function<bool()>& cancelled,
                   const Notice& notice) const;

  const Endpoint& endpoint() const { return options_.endpoint; }

 private:
  // Both tell whether the endpoint is of this host, but another process uses
  // its port.
  FileDescriptor listen(const std::vector<SocketAddress>& addresses,
                        bool& port_in_use) const;
  std::optional<OpenedStore> host(const std::vector<SocketAddress>& addresses,
                                  const Deadline& deadline,
                                  bool& port_in_use) const;
  // Why no store was reached.
  struct Failure {
    std::string reason{};
    int error = 0;  // of the system; 0 if there is none
    bool other_secret = false;
    bool stranger = false;  // AgentStoreStranger
    bool refused = false;   // each address refuses connections

    std::string text() const;  // the reason and the system's error
  };
  std::optional<OpenedStore> connect(
      const std::vector<SocketAddress>& addresses, const Deadline& deadline,
      const std::function<bool()>& cancelled, Failure& failure) const;

  StoreConnectorOptions options_;
};

}  // namespace lockstep::internal

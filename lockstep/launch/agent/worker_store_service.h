#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/nodes/agent_store.h"
#include "lockstep/launch/nodes/store/epoll_server.h"
#include "lockstep/launch/nodes/store/worker_table.h"
#include "lockstep/worker/worker_call.h"

namespace lockstep::internal {

// Serves the workers' store to the workers of this node, for one attempt: they
// connect to an abstract Unix socket (worker_store_link.h) and make calls
// (worker_call.h). Only processes of this user and of root are served.
//
// With one node the keys are here, and vanish with this object. With several
// they are at the host of the agents' store, one table for each attempt; this
// object then passes calls and replies on, over one connection of its own. That
// is one for the node and not one for each worker, so that the number of
// handshakes of TLS grows with the nodes only. What a worker sends is parsed
// here and wrapped, so that it reaches the workers' keys of its attempt and
// nothing else at the host.
//
// If the line is lost, so are the workers' connections, unless another line may
// come (renew()): then their calls wait for it. The store at its end is empty,
// and gets all calls again that were not answered.
//
// One thread does all this, so a worker that is slow or sends nonsense (its
// connection is closed then) holds up neither the agent nor other workers. The
// workers cannot make it use more memory than WorkerTable::kMostBytes, 64 MiB
// of replies, and for each connection some messages.
class WorkerStoreService : private EpollServer {
 public:
  // Listens at `name` and starts the thread. `line` is the connection to the
  // agents' store; null if the keys are here. `is_renewed`: another may come.
  // Throws std::system_error.
  WorkerStoreService(const std::string& name, int round,
                     std::shared_ptr<StoreLine> line, bool is_renewed = false);
  // Closes every connection and ends the thread.
  ~WorkerStoreService() override { stop(); }

  // Passes all calls on over `line` from now on. From any thread.
  void renew(std::shared_ptr<StoreLine> line);

  // Returns the name of the socket for an attempt of this process's job:
  //
  //   lockstep-store/<user id>/<process id>/<mark>/<round>/<MASTER_PORT>
  //
  // with AgentSocket::mark().
  // A program that has given itself another MASTER_PORT sees by it that this
  // store is not the one of the world that it wants to join.
  static std::string name_for(int round, int master_port);

 private:
  struct Client {
    Id id = 0;
    FileDescriptor socket{};
    MessageBuffer input{};
    std::string output{};
    std::deque<std::string> unanswered{};  // calls that were passed on
    std::optional<uint32_t> awaited_events{};
  };

  void serve_event(Id id, uint32_t events) override;
  void give_up() noexcept override;
  void accept_new();
  void serve(Client& client);
  // The next two return whether the client's connection lives on.
  bool answer_all(Client& client);
  bool flush(Client& client);
  bool may_ask(const Client& client) const;
  void take_call(Client& client, const std::string& message);
  void deliver(Id to, const std::string& reply);
  void take_line();
  void begin_line();
  void pass_on(const Client& client, const std::string& call);
  void serve_line();
  void send_line(const std::string& message);
  void flush_line();
  void lose_line();
  void drop(Id id);
  void drop_ending();
  void await_events(Client& client, uint32_t events) {
    watch(client.socket.get(), client.id, client.awaited_events, events);
  }

  FileDescriptor listener_;
  std::optional<uint32_t> listener_events_{};
  const int round_;
  const bool line_is_renewed_;
  std::mutex mutex_;
  std::shared_ptr<StoreLine> next_line_{};  // guarded by mutex_
  FileDescriptor renewal_;                  // readable if there is one
  std::optional<uint32_t> renewal_events_{};
  std::shared_ptr<StoreLine> line_;
  MessageBuffer line_input_{};
  std::string line_output_{};
  std::optional<uint32_t> line_events_{};
  bool lost_ = false;
  // The sums of Client::output's bytes and of Client::unanswered.
  size_t output_bytes_ = 0;
  size_t unanswered_ = 0;
  WorkerTable table_{};
  Id next_id_;
  std::unordered_map<Id, std::unique_ptr<Client>> clients_;
  // Clients whose next calls are not read until replies have come or the line
  // has taken what waits for it.
  std::set<Id> paused_;
  std::set<Id> ending_;  // to be dropped after the event under way
};

}  // namespace lockstep::internal

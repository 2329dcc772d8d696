#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/nodes/store/epoll_server.h"
#include "lockstep/launch/nodes/store/key_table.h"
#include "lockstep/launch/nodes/store/store_channel.h"
#include "lockstep/launch/nodes/store/store_message.h"
#include "lockstep/launch/nodes/store/worker_table.h"
#include "lockstep/launch/process/awake_clock.h"

namespace lockstep::internal {

// The limits of what connections may cost the host of the store.
// benchmarks/rendezvous.cpp has others, as all its agents begin at once.
struct StoreServerLimits {
  // A stranger is a connection that has not proved to know the secret, or, if
  // there is no secret, has not said hello. Above this number the oldest one is
  // dropped.
  size_t strangers = 256;
  // From the accepted connection to its hello.
  std::chrono::milliseconds until_hello{5000};
  // From the first byte of a message to its last, and for how long a reply may
  // not be taken. Longer than the network may be cut.
  std::chrono::milliseconds message{60'000};
};

// The agents' store: answers the requests of store_message.h at a socket that
// listens, in one thread. Connections that send what is not a request, or are
// slow with it, are dropped; the others do not notice. A connection takes at
// most two messages of memory, and some bytes for each worker that waits at its
// agent.
//
// Keeps the keys of the workers too, apart from those of the agents: a table
// for each round, from the first call to the end of the last connection for
// that round.
//
// An agent that gives its id (Operation::session) has a session, which
// outlives its connections: it connects again, and no request of it is lost or
// done twice. Each session keeps the last reply.
//
// The time in which this process is stopped (SIGSTOP) does not count against
// any connection.
class StoreServer : private EpollServer {
 public:
  // Starts the thread. `listener` listens already. `own` is the server's end of
  // a socket pair, whose other end this process uses; it is trusted without a
  // secret. Without a `secret`, connections are neither authenticated nor
  // encrypted. Throws std::system_error, std::runtime_error.
  StoreServer(FileDescriptor listener, FileDescriptor own,
              const std::optional<std::string>& secret,
              StoreServerLimits limits = {});
  // Closes every connection and ends the thread.
  ~StoreServer() override { stop(); }

  // Serves one more connection that is trusted without a secret: `socket` is
  // this side's end of a socket pair. Any thread.
  void serve_too(FileDescriptor socket);

  // Returns the agents with a session that are connected or may rejoin: whose
  // connection was not closed by the end of their process, as far as this host
  // can see. Any thread.
  std::set<std::string> agents();

 private:
  using Clock = AwakeClock::Clock;
  struct Connection {
    Id id = 0;
    StoreChannel channel;
    bool is_stranger = true;
    std::optional<uint32_t> awaited_events{};
    MessageBuffer input{};
    std::string output{};
    // Set while Operation::await_change has not been answered.
    std::vector<std::string> awaited_keys{};
    // The round of the workers whose calls come on it.
    std::optional<int64_t> round{};
    std::string agent{};        // whose session it is; empty if there is none
    Clock::time_point heard{};  // when the last message came
    // When it is dropped, in awake_'s time.
    std::optional<Clock::duration> due{};
  };

  void serve_event(Id id, uint32_t events) override;
  int longest_wait() const override;
  void begin_events() override { awake_.tick(Clock::now()); }
  void end_events() override;
  void give_up() noexcept override;
  void accept_new();
  void adopt_trusted();
  Connection& adopt(FileDescriptor socket, const TlsSettings* tls);
  void drop(Id id);
  // The next three return whether the connection lives on.
  bool serve(Connection& connection);
  bool answer_all(Connection& connection);
  bool flush(Connection& connection);
  void answer(Connection& connection, const std::string& message);
  void answer_hello(Connection& connection, const Request& request);
  void answer_session(Connection& connection, const Request& request);
  void answer_key(Connection& connection, const Request& request);
  void leave_session(const Connection& connection);
  void await_change(Connection& connection, Request request);
  void end_wait(Connection& connection);
  void serve_workers(Connection& connection, const Request& request);
  void answer_worker(Connection& connection, const Request& request);
  void leave_round(Connection& connection);
  void tell_waiters(const std::string& key);
  void set_due(Connection& connection);
  void await_events(Connection& connection, uint32_t events) {
    watch(connection.channel.fd(), connection.id, connection.awaited_events,
          events);
  }
  void listen_again();
  void drop_overdue();

  StoreServerLimits limits_;
  std::optional<TlsSettings> tls_;
  FileDescriptor listener_;
  std::optional<uint32_t> listener_events_{};
  FileDescriptor news_;  // readable: something is in trusted_
  std::optional<uint32_t> news_events_{};
  // Set after there was no descriptor for a new connection.
  std::optional<Clock::duration> ignored_until_{};
  AwakeClock awake_;
  KeyTable table_;
  struct Round {
    WorkerTable table{};
    std::set<Id> relays{};
  };
  std::map<int64_t, Round> rounds_;
  std::set<Id> closing_;  // of answer_worker()
  struct Session {
    int64_t done = 0;  // requests
    std::string last_reply{};
    std::optional<Id> connection{};
    // When its process seems to have ended.
    std::optional<Clock::time_point> closed{};
  };
  std::mutex mutex_;
  // The sessions by agent; changed by the thread, under mutex_.
  std::map<std::string, Session> sessions_;
  std::vector<FileDescriptor> trusted_;  // to be served too
  Id next_id_;
  std::unordered_map<Id, std::unique_ptr<Connection>> connections_;
  std::set<Id> strangers_;  // the oldest first
  std::set<Id> dated_;      // the connections with a `due`
  std::unordered_map<std::string, std::set<Id>> waiters_;  // by key
};

}  // namespace lockstep::internal

#pragma once

#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/worker/worker_call.h"

namespace lockstep::internal {

// The workers' store cannot be asked: the launcher's agent has ended or does
// not answer. The text is one line.
class WorkerStoreLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A worker's way to the store that its launcher keeps (LOCKSTEP_STORE). Has as
// many connections as there were calls at one time, so that a thread that waits
// for a key does not hold up the others. They stay open until this object ends,
// and with them the places that it has claimed.
//
// Threads: any. A process that was forked after the object was made cannot use
// it.
class WorkerStoreLink {
 public:
  // Connects to the abstract Unix socket `name`. Blocks until `deadline` at
  // most. Throws WorkerStoreLost.
  WorkerStoreLink(std::string name, const Deadline& deadline);
  WorkerStoreLink(const WorkerStoreLink&) = delete;
  WorkerStoreLink& operator=(const WorkerStoreLink&) = delete;

  // Makes a call that does not wait for a key, and returns its reply. Throws
  // WorkerStoreLost if the agent has ended or has not answered at the deadline;
  // std::invalid_argument if a key or a value is too long.
  WorkerReply call(const WorkerCall& call, const Deadline& deadline);
  // Returns once all of `keys` are set; false if they are not at the
  // deadline. Throws what call() throws, and std::invalid_argument if the store
  // has no room for the wait.
  bool wait(const std::vector<std::string>& keys, const Deadline& deadline);
  // Returns whether all of `keys` are set.
  bool check(const std::vector<std::string>& keys, const Deadline& deadline);

 private:
  struct Connection {
    FileDescriptor socket;
    MessageBuffer input{};
    bool owes_reply = false;  // to a wait that was given up
  };

  Connection connect(const Deadline& deadline) const;
  Connection take_idle(const Deadline& deadline);
  void give_back(Connection connection);
  // Returns nothing at the deadline.
  std::optional<WorkerReply> exchange(Connection& connection,
                                      const WorkerCall& call,
                                      const Deadline& deadline) const;
  std::optional<WorkerReply> receive(Connection& connection,
                                     const Deadline& deadline) const;

  const std::string name_;
  const ProcessMark made_in_;
  std::mutex mutex_;
  std::vector<Connection> idle_;
};

}  // namespace lockstep::internal

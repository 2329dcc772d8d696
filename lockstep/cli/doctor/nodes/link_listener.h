#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/cli/doctor/nodes/link_stream.h"

namespace lockstep::internal {

// Where the other nodes of a job reach this one while the links are measured.
//
// Only connections that begin with this listener's token are served. The token
// is random and known to those who may read the agents' store. A connection
// that sends something else is dropped at once; of those that have sent too
// little to tell, the oldest is dropped if there are more than 16. For one
// thread.
class LinkListener {
 public:
  // Listens at a free port of the address by which `reached_at` names this
  // host, or of all addresses, as bind_for_nodes(). `nodes`: how many nodes the
  // job has. Throws std::system_error; UnresolvedHost.
  LinkListener(const std::string& reached_at, int nodes);

  int port() const { return port_; }
  const std::string& token() const { return token_; }
  // Readable when take() may have something new to return.
  int fd() const { return epoll_.get(); }
  // Returns the connection of node `rank` if it has come. Does not block.
  std::optional<LinkStream> take(int rank);

 private:
  struct Stranger {
    FileDescriptor socket;
    std::string sent{};
  };
  void accept_new();
  // Returns whether the connection stays among the strangers.
  bool hear(Stranger& stranger);

  int nodes_;
  FileDescriptor socket_;
  int port_ = 0;
  std::string token_;
  FileDescriptor epoll_;
  std::deque<Stranger> strangers_;  // the oldest first
  std::map<int, FileDescriptor> members_;
};

// Answers what the other node asks over `stream` (link_stream.h), until it
// closes, for kMostLinkTime at most. Never fails: what happens is the other
// node's finding.
void answer_link(LinkStream stream);

}  // namespace lockstep::internal

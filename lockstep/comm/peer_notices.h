#pragma once

#include <string>

namespace lockstep::internal {

// Notices that a backend whose ranks share memory can give its peers, and have
// of them, beyond c10d. Internal to comm; found by dynamic_cast.
class PeerNotices {
 public:
  virtual ~PeerNotices() = default;

  // Returns the peers that did not leave normally, "rank 3 died; rank 2 failed:
  // ..."; of a peer that failed because of another rank the words about that
  // rank; empty if all are well. Any thread may call; makes a system call.
  virtual std::string departures() const = 0;

  // Whether departures() tells about all peers, and not only about those on
  // this host.
  virtual bool knows_all_peers() const = 0;

  // Does what c10d::Backend::abort() does, and the errors of the peers say
  // `cause`, which names the rank that failed first. Any thread.
  virtual void abort_because(const std::string& cause) = 0;

  // Says that an operation of this rank, in whatever group, failed because of
  // another rank. If this rank ends, peers that miss it are told `cause`, "rank
  // 3 died", and not that this rank died or left. The first cause counts. Any
  // thread.
  virtual void keep_cause(const std::string& cause) = 0;

  // Ends pending operations as the destructor does, and then tells the peers
  // that this rank has left: operations that still wait for something from it
  // fail at once, and what it has given them stays theirs. No operation may
  // follow. No other thread may use the backend meanwhile.
  virtual void leave() = 0;
};

}  // namespace lockstep::internal

#pragma once

#include <string>

namespace lockstep {

// What a backend can tell its peers, and about them, beyond c10d: one whose
// ranks share memory. Internal to comm; found by dynamic_cast.
class PeerNotices {
 public:
  virtual ~PeerNotices() = default;

  // "rank 3 died; rank 2 failed: ...": the peers that did not leave in peace,
  // empty if all are well. Any thread; a system call.
  virtual std::string departures() const = 0;

  // Whether departures() tells of all peers, and not of those of this host
  // only.
  virtual bool knows_all_peers() const = 0;

  // Ends what is pending, as the destructor does, and then tells the peers that
  // this rank has left: what they still wait for from it fails at once, and
  // what it has given them stays theirs. No operation may follow. Not while
  // another thread uses the backend.
  virtual void leave() = 0;
};

}  // namespace lockstep

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/comm/shm/protocol/errors.h"
#include "lockstep/comm/shm/protocol/peer_links.h"
#include "lockstep/comm/shm/protocol/tuning.h"

// How processes of one host come to share memory.
namespace lockstep::internal::shm {

// How ranks tell each other texts before they meet: a store that all can reach.
// The keys are new for each meeting. Both functions throw if the store fails,
// or if it knows that the other ranks will not come; the text of that error
// becomes the text of the failed meeting.
struct Exchange {
  std::function<void(const std::string& key, const std::string& value)> set;
  // Waits until the key is set; returns nothing if it is not set after
  // `allowed`. The handshake asks for short times only.
  std::function<std::optional<std::string>(const std::string& key,
                                           std::chrono::milliseconds allowed)>
      get;
};

struct Meeting {
  int rank;
  int size;  // 1 to 64
  // How error texts name the ranks; empty means by their numbers in this group.
  std::vector<int> global_ranks{};
  std::chrono::milliseconds timeout;
  Tuning tuning;  // rank 0's counts
};

// The parts of a group: the memory, and the links to the other ranks.
struct Membership {
  Meeting meeting;  // with rank 0's tuning
  std::shared_ptr<SharedMemory> segment;
  std::shared_ptr<PeerLinks> links;
};

// Meets the other ranks and maps one segment with them. Each rank listens on an
// abstract Unix socket with a random name, which it publishes, and connects to
// the ranks of lower number. Both ends check that the other process has this
// one's user (SO_PEERCRED) and knows the secret in the store; a connection that
// fails this is dropped. Rank 0 makes the segment and hands its descriptor to
// the others. The sockets stay open: if one hangs up, its process has ended, in
// whatever pid namespace it lived.
//
// Rank 0 hears of every failure and tells it, so all ranks throw the same:
// Unavailable if one of them cannot have the memory or is not on this host;
// GroupBroken if a rank does not come within `timeout`, dies or has no store;
// std::invalid_argument if ranks differ about the size, two processes call
// themselves one rank, or rank 0's tuning is wrong. If `meeting` itself is
// wrong, only this rank throws, std::invalid_argument.
//
// Keys: "shm/secret", from rank 0; "shm/RANK": "here SIZE NAME IDENTITY" or
// "failed KIND WHY".
//
// Blocks until all ranks have the segment, for `timeout` at most.
Membership meet(const Exchange& exchange, const Meeting& meeting);

// Returns a text that is equal for processes that may try to meet: it holds the
// kernel's boot, the network namespace (abstract sockets live in it) and the
// user. Throws std::system_error or std::runtime_error if /proc does not tell
// these.
std::string host_identity();

}  // namespace lockstep::internal::shm

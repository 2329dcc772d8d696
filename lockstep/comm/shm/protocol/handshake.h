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
namespace lockstep::shm {

// What ranks tell each other beforehand: a store that all can reach. Its keys
// are new for each meeting. Both throw if the store fails, or if it knows that
// the other ranks will not come; the text becomes that of the failed meeting.
struct Exchange {
  std::function<void(const std::string& key, const std::string& value)> set;
  // Blocks until the key is there; nothing if it is not when `allowed` is over,
  // which is asked for in small portions.
  std::function<std::optional<std::string>(const std::string& key,
                                           std::chrono::milliseconds allowed)>
      get;
};

struct Meeting {
  int rank;
  int size;  // 1 to 64
  // How messages name the ranks; empty: by their numbers here.
  std::vector<int> global_ranks{};
  std::chrono::milliseconds timeout;
  Tuning tuning;  // rank 0's counts
};

// What a group works on: the memory, and the ties to the other ranks.
struct Membership {
  Meeting meeting;  // with rank 0's tuning
  std::shared_ptr<SharedMemory> segment;
  std::shared_ptr<PeerLinks> links;
};

// Meets the other ranks and maps one segment with them. Each rank listens on
// an abstract Unix socket with a random name, which it publishes, and connects
// to those of lower rank; both ends check that the other process has this
// one's user (SO_PEERCRED) and knows the secret that the store holds. Who does
// not is dropped. Rank 0 makes the segment and hands its descriptor over. The
// sockets stay open: that one hangs up is the notice of its process's death, in
// whatever pid namespace it lives.
//
// Rank 0 hears of every failure, and all ranks throw the same: Unavailable if
// one of them cannot have the memory or is not of this host; GroupBroken if a
// rank does not come by the end of `timeout`, dies or has no store;
// std::invalid_argument if ranks differ in size, or two are one, or rank 0's
// tuning is wrong. What is wrong with `meeting` itself throws
// std::invalid_argument here only.
//
// Keys: "shm/secret", from rank 0; "shm/RANK": "here SIZE NAME IDENTITY" or
// "failed KIND WHY".
//
// Blocks until all ranks have the segment, `timeout` at most.
Membership meet(const Exchange& exchange, const Meeting& meeting);

// What equal strings of tell: these processes may try to meet. The kernel's
// boot, the network namespace (abstract sockets live in it) and the user.
// Throws std::system_error or std::runtime_error where /proc does not tell.
std::string host_identity();

}  // namespace lockstep::shm

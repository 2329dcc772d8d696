#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/shared_memory.h"

namespace lockstep::internal::shm {

// One connected socket to each other rank of the group. Tells which ranks hung
// up, and carries descriptors of registered memory. No call blocks. Threads:
// the caller must serialise the calls, except hung_up() and hang_up(), which
// any thread may call.
//
// In a child that was forked after construction nothing is sent or received:
// the child's copies of the sockets are the parent's connections.
class PeerLinks {
 public:
  // `sockets[r]` leads to rank r; this rank's own is empty. They are
  // SOCK_SEQPACKET and non-blocking.
  explicit PeerLinks(std::vector<FileDescriptor> sockets);

  // Returns the ranks whose process has ended or left, in order; a system call.
  // What they sent before can still be received. After this rank has hung up
  // itself, returns all other ranks.
  std::vector<int> hung_up() const;

  // Hangs up on all peers, which take it as this rank's end.
  void hang_up() const;

  // Lends `memory` to rank `to`, or takes the loan `id` back. Both return false
  // if the socket is full; try again later. If the rank has hung up they do
  // nothing and return true. Both throw std::system_error.
  bool lend(int to, uint64_t id, const SharedMemory& memory) const;
  bool take_back(int to, uint64_t id) const;

  struct Loan {
    uint64_t id;
    uint64_t bytes;  // 0 if it is taken back
    // Empty although `bytes` is not 0 if this process had no descriptor left to
    // receive it with (EMFILE).
    FileDescriptor memory{};
  };
  // Returns the next loan or return of one that has come from rank `from`, if
  // any, without waiting. Throws std::system_error, or std::runtime_error if
  // what came is not a loan.
  std::optional<Loan> receive(int from) const;

 private:
  const ProcessMark made_in_{};
  std::vector<FileDescriptor> sockets_;
};

}  // namespace lockstep::internal::shm

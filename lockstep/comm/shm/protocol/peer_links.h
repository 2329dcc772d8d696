#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/process_mark.h"
#include "lockstep/base/shared_memory.h"

namespace lockstep::shm {

// One connected socket to each other rank of the group. Says who hung up, and
// carries descriptors of registered memory. No call blocks. Threads: calls are
// serialised by the caller, except hung_up() and hang_up(), which any thread
// may call.
//
// In a child that was forked since, nothing is said or heard: its copies of the
// sockets are the parent's connections.
class PeerLinks {
 public:
  // `sockets[r]` leads to rank r; this rank's own is empty. SOCK_SEQPACKET,
  // non-blocking.
  explicit PeerLinks(std::vector<FileDescriptor> sockets);

  // The ranks whose process has ended or left, in order; a system call. What
  // they sent before can still be received. All of them once this rank has
  // hung up itself.
  std::vector<int> hung_up() const;

  // Hangs up on all: they see it as this rank's end.
  void hang_up() const;

  // Both: false if the way to `to` is full, to be tried again later; a rank
  // that has hung up swallows it. Throw std::system_error.
  bool lend(int to, uint64_t id, const SharedMemory& memory) const;
  bool take_back(int to, uint64_t id) const;

  struct Loan {
    uint64_t id;
    uint64_t bytes;  // 0: taken back
    // Empty although there are bytes: this process had no descriptor left to
    // receive it with (EMFILE).
    FileDescriptor memory{};
  };
  // What has come from `from`, without waiting for it. Throws
  // std::system_error, or std::runtime_error if what came is no loan.
  std::optional<Loan> receive(int from) const;

 private:
  const ProcessMark made_in_{};
  std::vector<FileDescriptor> sockets_;
};

}  // namespace lockstep::shm

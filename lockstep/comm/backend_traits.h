#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/base/deadline.h"

namespace lockstep::internal {

// In what a c10d::Backend differs from most others, for the code that calls all
// of them. A backend that differs derives from this class too and overrides
// what is different. Internal to comm.
class BackendTraits {
 public:
  virtual ~BackendTraits() = default;

  // Whether the backend takes lists of tensors of any sizes and dtypes as one
  // operation: allgather() takes different sizes, allreduce_coalesced() and
  // allgather_coalesced() take different dtypes, and sparse tensors can be
  // averaged, too. Then one call of the user is compared as a whole, and if the
  // ranks disagree it ends on all of them at the same tensor.
  virtual bool takes_lists_at_once() const { return false; }

  // Whether allreduce() takes sparse tensors.
  virtual bool sums_sparse() const { return true; }

  // Whether peers keep waiting for a rank whose operation has failed until that
  // rank calls abort().
  virtual bool failure_needs_abort() const { return false; }

  // Whether shutdown() must be called before the destructor, as Python's
  // destroy_process_group() does.
  virtual bool needs_shutdown() const { return true; }

  // Blocks until the peers have connected to this rank as it has to them. A
  // backend in which a rank may be ready before its peers are overrides this:
  // if it ended at once, a peer that still connects would take that for a
  // failure. Returns early if a peer cannot connect any more or `deadline` has
  // passed. Throws nothing.
  virtual void await_peers(const Deadline& /*deadline*/) const {}
};

// Returns the traits of `backend`, or those of most backends if it has none of
// its own (that of a user, for example). They live as long as the backend.
inline const BackendTraits& traits_of(const c10d::Backend& backend) {
  static const BackendTraits usual;
  const auto* own = dynamic_cast<const BackendTraits*>(&backend);
  return own != nullptr ? *own : usual;
}

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
  // follow, and no abort(). No other thread may use the backend meanwhile.
  virtual void leave() = 0;
};

// The interface of a c10d::Backend whose smallest all_reduce takes less time
// than the options, lists and works of c10d cost. Internal to comm.
class DirectReduce {
 public:
  // Does what the backend's allreduce() with asyncOp false does, on `count`
  // contiguous elements at `data` in host memory: it runs in the calling
  // thread, after pending operations, in the same order and with the same
  // errors. Allocates nothing.
  virtual void all_reduce_direct(void* data, int64_t count,
                                 at::ScalarType dtype,
                                 c10d::ReduceOp::RedOpType op,
                                 std::chrono::milliseconds timeout) = 0;

 protected:
  // Objects are owned as c10d::Backend.
  ~DirectReduce() = default;
};

}  // namespace lockstep::internal

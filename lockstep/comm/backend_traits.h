#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

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

  // Whether peers keep waiting for a rank whose operation has failed until that
  // rank calls abort().
  virtual bool failure_needs_abort() const { return false; }

  // Blocks until the peers have connected to this rank as it has to them. A
  // backend in which a rank may be ready before its peers are overrides this:
  // if it ended at once, a peer that still connects would take that for a
  // failure. Returns early if a peer cannot connect any more or `deadline` has
  // passed. Throws nothing.
  virtual void await_peers(const Deadline& /*deadline*/) const {}
};

// Returns the traits of `backend`, or those of most backends if it has none of
// its own (NCCL's, for example). They live as long as the backend.
inline const BackendTraits& traits_of(const c10d::Backend& backend) {
  static const BackendTraits usual;
  const auto* own = dynamic_cast<const BackendTraits*>(&backend);
  return own != nullptr ? *own : usual;
}

}  // namespace lockstep::internal

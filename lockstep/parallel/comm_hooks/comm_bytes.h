#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/base/span.h"

namespace lockstep {

// Counts what this process gives to collectives and messages, whoever calls
// them: DistributedDataParallel, a hook of this folder, a user's own. Counts
// from construction to destruction.
//
//   lockstep::CommBytes sent;
//   loss.backward();
//   sent.bytes();
//
// bytes(): of the tensors that this rank hands in, once: an all_reduce of 1 KiB
// is 1 KiB whatever the number of ranks, an all_gather what this rank adds.
// What crosses the wires is in proportion to it, as the backend's algorithm
// says. Of broadcast, gather and scatter all that the call names; of receives,
// and of sparse tensors, nothing.
//
// Seen by spans (base/span.h); what moves gradients without a collective (in
// memory that ranks share) is not. While it counts, small all-reduces take the
// longer way. Threads: any.
class CommBytes {
 public:
  CommBytes();
  ~CommBytes();
  CommBytes(const CommBytes&) = delete;
  CommBytes& operator=(const CommBytes&) = delete;

  int64_t bytes() const;
  int64_t operations() const;
  // From zero again.
  void reset();

 private:
  class Observer;
  std::shared_ptr<Observer> observer_;
  SpanSubscription subscription_;
};

}  // namespace lockstep

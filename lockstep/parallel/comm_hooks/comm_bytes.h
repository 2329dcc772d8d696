#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/trace/span.h"

namespace lockstep {

// Counts the bytes that this process hands to collectives and messages,
// whatever code calls them: DistributedDataParallel, a hook of this folder, or
// the user's program. Counts from construction to destruction.
//
//   lockstep::CommBytes sent;
//   loss.backward();
//   sent.bytes();
//
// bytes() counts the tensors that this rank hands in, once: an all_reduce of 1
// KiB is 1 KiB whatever the number of ranks, an all_gather is what this rank
// contributes. The traffic on the wires is proportional to it; the factor
// depends on the backend's algorithm. For broadcast, gather and scatter it
// counts all tensors that the call names; for receives, and for sparse tensors,
// it counts nothing.
//
// It counts by spans (trace/span.h), so gradients that move without a
// collective (in memory that ranks share) are not counted. While a counter
// lives, small all-reduces take a slower path. Threads: any.
class CommBytes {
 public:
  CommBytes();
  ~CommBytes();
  CommBytes(const CommBytes&) = delete;
  CommBytes& operator=(const CommBytes&) = delete;

  int64_t bytes() const;
  int64_t operations() const;
  // Counts from zero again.
  void reset();

 private:
  class Observer;
  std::shared_ptr<Observer> observer_;
  internal::SpanSubscription subscription_;
};

}  // namespace lockstep

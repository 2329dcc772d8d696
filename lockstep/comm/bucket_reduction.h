#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Elements [begin, end) of a bucket.
struct ElementRange {
  int64_t begin;
  int64_t end;
  bool operator==(const ElementRange&) const = default;
};

// One bucket of a BucketReduction.
struct ReducedBucket {
  at::Tensor flat;  // [n], contiguous; this rank's contribution, then result
  // What this rank reduces, ascending and disjoint; over all ranks each
  // element once. Empty on all ranks: equal slices in rank order, each of n /
  // size elements rounded up to whole cache lines (64 bytes), the last ones
  // shorter or empty. Used by Results::owned, and a hint otherwise.
  std::vector<ElementRange> owned{};
};

// Which elements hold the reduction afterwards; the others are undefined.
enum class Results {
  everywhere,  // all, on every rank: an all-reduce
  owned,       // those that the rank owns: a reduce-scatter in place
};

// Reduces the same buckets again and again, once a backward pass: the seam
// between what computes gradients (DDP, sharded optimizers) and what moves
// them.
//
// A round is: begin(), then publish() of every bucket in the order of their
// indices, advance() whenever it suits, finish(). A rank may give the round up
// instead, by abandon() or by the next reclaim() or begin(); then every rank
// gives it up, unless it needs nothing more of that one. All ranks do the same
// rounds, in one order with the group's collectives where those are what moves
// buckets (all_reduce_buckets()); else at any time beside them.
//
// Threads: one at a time. Blocking: begin(), reclaim() and finish() wait for
// peers, for the group's timeout at most; the others never do. Errors:
// c10::DistBackendError names a rank that is gone, did not come in time or has
// given up; std::logic_error where the calls of this rank are in a wrong order.
// After an error the buckets' content is undefined.
class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  // A new round, in which the sum over all ranks is divided by `divisor`, more
  // than 0 and equal on all ranks. `iteration`: the caller's own count; where
  // that of some rank differs in the same round, its ranks would sum up
  // gradients of two iterations: all of them throw c10::DistBackendError with
  // the numbers, in shared memory always, else where the group compares calls
  // (ProcessGroup::checks_calls()). Calls reclaim() first. After begin() this
  // rank may write into its buckets.
  virtual void begin(int64_t iteration, double divisor) = 0;

  // Gives up the round that this rank is in, if any. In shared memory peers
  // that wait for this rank throw at once and name it.
  virtual void abandon() {}

  // Ends a round that was begun and not finished, and waits until no peer uses
  // this rank's buckets for it, so that they may be written before begin().
  // Every rank calls it, or none does. Where peers did not need this rank any
  // more they have finished the round: in shared memory this rank throws
  // c10::DistBackendError then, as it lacks their results. Where collectives
  // move the buckets, peers that have not given up get NaN in those that this
  // rank had not published.
  virtual void reclaim() {}

  // What this rank must have multiplied its contribution by when it publishes
  // it in this round: 1 where the division is a part of the reduction, else
  // 1 / divisor. The same on all ranks.
  virtual double contribution_factor() const = 0;

  // The contribution is complete; `bucket` is this rank's no more until
  // finish().
  virtual void publish(size_t bucket) = 0;

  // Goes on with what all ranks have published. Returns how many buckets, from
  // the first, hold their results (as Results says) on this rank.
  virtual size_t advance() = 0;

  // Until every bucket holds its results.
  virtual void finish() = 0;
};

// By all_reduce of each bucket: any backend, any device, any dtype that can be
// summed; Results are everywhere. What Python's DistributedDataParallel issues.
// In a world of one nothing is done at all. No collective.
std::unique_ptr<BucketReduction> all_reduce_buckets(
    std::vector<ReducedBucket> buckets, ProcessGroupPtr group);

// The best way that the group has: the shared memory of one host
// (host_sharing.h) where all buckets of all ranks lie there, else
// all_reduce_buckets(), as in a world of one and where the group compares each
// call (ProcessGroup::checks_calls()). Collective: buckets that differ between
// ranks are a c10::DistBackendError on all of them. `results`: owned only in
// shared memory; else they are everywhere, which is more.
//
// In shared memory this is one collective in the group's numbers, flight record
// and errors ("make_bucket_reduction #7"), and so is a round ("reduce_buckets
// #12"): finish() counts as a blocking call of the group, so that a rank in
// another one that waits for this rank is told (docs/shared-memory.md); the sum
// is that of all_reduce, bit by bit. Where the divisor is the number of ranks
// it divides as ReduceOp::AVG, else it is multiplied by 1 / divisor, for which
// half types are rounded twice.
std::unique_ptr<BucketReduction> make_bucket_reduction(
    std::vector<ReducedBucket> buckets, Results results,
    const ProcessGroupPtr& group);

}  // namespace lockstep

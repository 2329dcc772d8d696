#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/bucket_terms.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/state/box.h"

namespace lockstep::internal {

// One bucket of a BucketReduction.
struct ReducedBucket {
  at::Tensor flat;  // [n], contiguous; this rank's contribution, then result
  // The ranges that this rank reduces, ascending and disjoint; those of all
  // ranks together contain each element once. Empty on all ranks: equal slices
  // in rank order, each of n / size elements rounded up to whole cache lines
  // (64 bytes), the last ones shorter or empty. Results::owned follows these
  // ranges; otherwise they are a hint.
  std::vector<Range> owned{};
  // Ascending and disjoint, the same on all ranks: ranges whose contribution
  // may lie in the rank's arena instead (BucketReduction::publish()).
  std::vector<Range> movable{};
};

// Reduces the same buckets again and again, once a backward pass: the seam
// between the code that computes gradients (DDP, sharded optimizers) and the
// code that moves them.
//
// One reduction is: begin(), then publish() of every bucket in the order of
// their indices, advance() at any time in between, finish(). A rank may give a
// reduction up instead, by abandon() or by the next reclaim() or begin(); then
// every rank gives it up, except a rank that needs nothing more from the one
// that did. All ranks make the same reductions in the same order. If
// collectives move the buckets (all_reduce_buckets()), the reductions also keep
// one order with the group's other collectives; otherwise they may run at any
// time beside them.
//
// Threads: one at a time may call. Blocking: begin(), reclaim() and finish()
// wait for peers, for the group's timeout at most; the other functions never
// block. Errors: c10::DistBackendError names a rank that is gone, did not come
// in time or has given up; std::logic_error if this rank makes its calls in a
// wrong order. After an error the contents of the buckets are undefined.
class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  // Begins a reduction, in which the sum over all ranks is divided by
  // `divisor`, which is more than 0 and equal on all ranks. `iteration` is the
  // caller's own count. If it differs between ranks, they would sum gradients
  // of different iterations, so all of them throw c10::DistBackendError with
  // the numbers; in shared memory this is always checked, otherwise only if the
  // group compares calls (ProcessGroup::checks_calls()). Calls reclaim() first.
  // After begin() this rank may write into its buckets.
  virtual void begin(int64_t iteration, double divisor) = 0;

  // Makes errors use these words for iterations. Returns whether iterations are
  // always compared.
  virtual bool word_iterations(IterationWords /*words*/) { return false; }

  // Gives up the reduction that this rank has begun, if any. In shared memory,
  // peers that wait for this rank throw at once and name it.
  virtual void abandon() {}
  // The same, and gives up all later reductions, which peers may have begun.
  // This rank makes none any more.
  virtual void abandon_all() { abandon(); }

  // Ends a reduction that was begun and not finished, and waits until no peer
  // uses this rank's buckets for it, so that this rank may write them before
  // begin(). Every rank calls it, or none does. Peers that needed nothing more
  // from this rank may have finished the reduction: in shared memory this rank
  // then throws c10::DistBackendError, because it lacks the results that they
  // have. If collectives move the buckets, peers that have not given up get NaN
  // in the buckets that this rank had not published.
  virtual void reclaim() {}

  // Returns the factor by which this rank must have multiplied its contribution
  // when it publishes it in this reduction: 1 if dividing is a part of the
  // reduction, otherwise 1 / divisor. It is the same on all ranks.
  virtual double contribution_factor() const = 0;

  // Whether contributions to movable ranges may lie in this rank's arena. The
  // same on all ranks.
  virtual bool moves() const { return false; }

  // Says that this rank's contribution to `bucket` is complete. From then until
  // finish() the bucket does not belong to this rank.
  //
  // `places`, if not empty: for each movable range of the bucket, where in the
  // arena its contribution lies and its result shall be, in bytes from the
  // arena's beginning; or kInBucket. This memory, too, does not belong to this
  // rank until finish(), or until reclaim() if the reduction is given up. Only
  // if moves().
  virtual void publish(size_t bucket, std::span<const uint64_t> places) = 0;
  void publish(size_t bucket) { publish(bucket, {}); }

  // Says that no rank contributes to `bucket`, instead of publish(); its
  // contents are undefined then.
  virtual void skip(size_t bucket) { publish(bucket); }

  // Continues with the buckets that all ranks have published. Returns how many
  // buckets, counted from the first, hold their results (as Results says) on
  // this rank.
  virtual size_t advance() = 0;

  // Blocks until every bucket holds its results.
  virtual void finish() = 0;
};

// Reduces each bucket by all_reduce(), as Python's DistributedDataParallel
// does: on any backend and device, for any dtype that can be summed. The
// results are everywhere. In a group of one rank nothing is done at all. This
// function is not a collective.
std::unique_ptr<BucketReduction> all_reduce_buckets(
    std::vector<ReducedBucket> buckets, ProcessGroupPtr group);

// Makes the best reduction that the group has: by the shared memory of one host
// (host_sharing.h) if all buckets of all ranks lie there, otherwise by
// all_reduce_buckets(); also by the latter in a group of one rank, and if the
// group compares each call (ProcessGroup::checks_calls()). Collective: if
// buckets differ between ranks, all of them throw c10::DistBackendError.
// Results::owned is followed only in shared memory; otherwise the results are
// everywhere, which is more.
//
// In shared memory this function is one collective in the group's numbers,
// flight record and errors ("make_bucket_reduction #7"), and so is each
// reduction ("reduce_buckets #12"). finish() counts as a blocking call of the
// group, so that a rank that waits for this one in another blocking call is
// told (docs/internals/shared-memory.md). The sum is that of all_reduce, bit by
// bit. If the divisor is the number of ranks, the sum is divided as by
// ReduceOp::AVG; otherwise it is multiplied by 1 / divisor, for which half
// types are rounded twice.
//
// `arena`: contiguous memory of this rank from empty_shared() for contributions
// to movable ranges, or undefined.
std::unique_ptr<BucketReduction> make_bucket_reduction(
    std::vector<ReducedBucket> buckets, Results results,
    const ProcessGroupPtr& group, const at::Tensor& arena = {});

// Makes a reduction without buckets, for gradients that are reduced in another
// way: it only compares the ranks' iterations. In shared memory finish() does
// so, and abandon() tells peers that wait there; otherwise begin() does if the
// group compares calls (ProcessGroup::checks_calls()), and else nothing is
// compared. `on_cpu`: whether the gradients are on the CPU; otherwise ranks do
// not wait for each other in memory. Collective.
std::unique_ptr<BucketReduction> make_iteration_check(
    const ProcessGroupPtr& group, bool on_cpu);

}  // namespace lockstep::internal

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/bucket_layout.h"
#include "lockstep/comm/shm/protocol/common_memory.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::shm {

class Patience;

// One bucket of this rank: `count` elements of a floating dtype in its
// registered memory.
struct ExchangedBucket {
  void* data;
  size_t count;
  DType dtype;
  // What this rank reduces. None on all ranks: equal_slice().
  std::vector<Interval> owned{};
};

// Reduces the same buckets of registered memory again and again, without a
// collective a bucket and without a thread: each rank counts what it has
// published and reduced on cache lines of its own, and reduces its elements of
// every bucket that all have published, whenever it is asked to.
//
// Element i of the result is ((rank 0 + rank 1) + rank 2) ... in the arithmetic
// of kernels::reduce(), divided: by kernels::reduce()'s avg where the divisor
// is the number of ranks, else by kernels::scale() with 1 / divisor behind the
// sum (which the half types thus round twice). The same bits on all ranks.
//
// A round is begin(), publish() of every bucket in order, advance() at any
// time, finish(). It may be given up instead, by abandon() or by the next
// reclaim() or begin(). Every rank ends each round in one of these ways, and
// either all have finished it or all have given it up when the next one begins:
// - A rank that waits in finish() for what a rank has not done that gave the
//   round up throws CallMismatch at once, and is to give it up, too.
// - A rank may give up when it has done all that the others wait for, so that
//   these finish. reclaim() and begin() of that rank throw CallMismatch then:
//   it lacks an iteration that the others have. The round is over all the same.
//
// Threads: one at a time, beside the group's collectives and messages.
// Errors: GroupBroken, as the group's collectives; std::logic_error where this
// rank's calls are in a wrong order. The group must outlive it.
class BucketExchange {
 public:
  enum class Results { everywhere, owned };

  // A collective of the group. Null on all ranks if some rank's buckets cannot
  // be reached by all others: they are not registered, or descriptors or memory
  // are out. Throws CallMismatch on all ranks, with what the first two say that
  // disagree about the number of buckets, their sizes, dtypes or owners.
  // `timeout`: of this, and of each begin() and finish().
  static std::unique_ptr<BucketExchange> make(
      Group& group, const std::vector<ExchangedBucket>& buckets,
      Results results, milliseconds timeout);

  // Gives up the round that this rank is in, if any, and tells the others.
  // Never blocks.
  void abandon();
  // Gives up the round that this rank is in, if any, and waits until all ranks
  // have ended it, so that no peer uses this rank's buckets. Throws
  // CallMismatch if others have finished it.
  void reclaim();
  // Waits as reclaim(). Throws std::invalid_argument unless `divisor` is more
  // than 0. `iteration`: the caller's count, which advance() and finish()
  // compare between the ranks: where one differs they throw CallMismatch on all
  // ranks that come so far.
  void begin(int64_t iteration, double divisor);
  // The next one, of which this rank's contribution is complete. Never blocks.
  void publish(size_t bucket);
  // Never blocks. How many buckets hold their results, from the first. Throws
  // CallMismatch, see begin().
  size_t advance() { return advance(std::memory_order_acquire); }
  void finish();

 private:
  // Of one rank; each on a line of its own, counted over all rounds.
  struct Counters {
    alignas(64) std::atomic<uint64_t> published;
    // The caller's iteration. The two slots alternate from round to round: with
    // one_shot a peer may be one round ahead of this rank.
    std::atomic<int64_t> iterations[2];
    alignas(64) std::atomic<uint64_t> reduced;
    // The last round, from 1, that this rank has given up, and finished.
    alignas(64) std::atomic<uint64_t> given_up;
    std::atomic<uint64_t> finished;
    alignas(64) std::byte unused[64];  // lines are fetched in pairs
  };
  struct Bucket {
    size_t count;
    DType dtype;
    std::vector<Interval> owned;
    std::vector<std::byte*> data;                  // by rank
    std::vector<std::shared_ptr<std::byte>> held;  // the peers' mappings
    // So small that each rank copies its contribution beside the counters, and
    // reduces all of it: who has all contributions waits for nobody.
    bool one_shot;
    size_t offset;  // of the copy
  };

  // `copy_bytes`: of each rank in one round.
  BucketExchange(Group& group, std::vector<Bucket> buckets, size_t copy_bytes,
                 Results results, milliseconds timeout);
  Counters& counters(int rank) const {
    return reinterpret_cast<Counters*>(memory_.data())[rank];
  }
  Counters& own() const;

  // Where rank `of`'s contribution is copied: in the rounds by turns to one of
  // two places, so that peers still read one when it writes the other.
  std::byte* copy_of(int of, const Bucket& bucket) const;
  size_t advance(std::memory_order order);
  void compare_iterations() const;
  // `known`: what `counter` of every rank is at least.
  bool all_have(std::atomic<uint64_t> Counters::*counter, size_t bucket,
                uint64_t& known, std::memory_order order) const;
  void reduce(const Bucket& bucket) const;
  void reduce_copies(const Bucket& bucket) const;
  void reduce_piece(const Bucket& bucket, Interval elements) const;
  size_t progress() const { return next_ + complete_; }
  void await_progress(Patience& patience);
  using Missing = std::function<uint64_t(std::memory_order)>;
  // The ranks, as bits, of which `counter` is less than `value`.
  uint64_t below(std::atomic<uint64_t> Counters::*counter, uint64_t value,
                 std::memory_order order) const;
  // The ranks that have given up the round that this one is in, of `missing`.
  uint64_t given_up(uint64_t missing, std::memory_order order) const;
  void throw_if_given_up(const Missing& missing) const;
  // Until none is missing, or one of these has given up.
  void await(const Missing& missing, Patience& patience,
             const std::function<std::string()>& complaint) const;
  std::string complain(uint64_t ranks, const std::string& complaint) const;
  std::string bucket_name(size_t bucket) const;
  // Tells wrappers apart: " of 1234 elements".
  std::string size_in_words() const;

  Core& core_;
  const std::vector<Bucket> buckets_;
  const size_t copy_bytes_;
  const Results results_;
  const milliseconds timeout_;
  CommonMemory memory_;
  uint64_t rounds_ = 0;     // begun
  bool open_ = false;       // begun, and neither finished nor reclaimed
  bool abandoned_ = false;  // given up, and so told to the others
  int64_t iteration_ = 0;
  double divisor_ = 1;
  // What the counters were when the round began: buckets of all rounds before.
  uint64_t base_ = 0;
  uint64_t known_published_ = 0;  // by all ranks, at least
  uint64_t known_reduced_ = 0;
  size_t published_ = 0;  // of this round: by this rank
  size_t next_ = 0;       // to reduce
  size_t complete_ = 0;
};

}  // namespace lockstep::shm

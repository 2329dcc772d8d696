#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/bucket_terms.h"
#include "lockstep/comm/shm/protocol/bucket_layout.h"
#include "lockstep/comm/shm/protocol/common_memory.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::internal::shm {

class Patience;

// Reduces the same buckets of registered memory again and again, without a
// collective for each bucket and without a thread. Each rank counts, on cache
// lines of its own, what it has published and reduced. Whenever a rank is asked
// to, it reduces its elements of every bucket that all ranks have published.
//
// Element i of the result is ((rank 0 + rank 1) + rank 2) ... in the arithmetic
// of kernels::reduce(), divided by the divisor. If the divisor is the number of
// ranks, avg of kernels::reduce() divides; otherwise kernels::scale()
// multiplies the sum by 1 / divisor, so half types are rounded twice. All ranks
// get the same bits.
//
// One reduction is begin(), publish() of every bucket in order, advance() at
// any time, and finish(). A rank may give the reduction up instead, by
// abandon() or by the next reclaim() or begin(). Every rank ends each reduction
// in one of these ways. When the next one begins, either all ranks have
// finished this one or all have given it up:
// - If a rank waits in finish() for something that another rank has not done
//   and, as it gave up, will not do, the waiting rank throws CallMismatch at
//   once. It must then give the reduction up, too.
// - If a rank gives up after it has done all that the others wait for, the
//   others finish. reclaim() and begin() of the rank that gave up then throw
//   CallMismatch, because it lacks an iteration that the others have. The
//   reduction is over nevertheless.
//
// Threads: one at a time, also while other threads use the group's collectives
// and messages. Errors: GroupBroken, as from the group's collectives;
// std::logic_error if this rank's calls are in a wrong order. The group must
// outlive this object.
class BucketExchange {
 public:
  // Memory of this rank in which contributions may lie instead of in their
  // bucket; null if there is none.
  struct Arena {
    void* data = nullptr;
    size_t bytes = 0;
  };

  // A collective of the group. Returns null on all ranks if some rank's buckets
  // cannot be reached by all others: they are not registered, or there are no
  // descriptors or no memory left. If the ranks disagree about the number of
  // buckets, their sizes, dtypes or owners, throws CallMismatch on all ranks,
  // with what the first two that disagree have. `timeout` is for each begin()
  // and finish(), and for this call, unless `for_making` is given.
  static std::unique_ptr<BucketExchange> make(
      Group& group, const std::vector<Bucket>& buckets, Results results,
      milliseconds timeout, Arena arena,
      std::optional<milliseconds> for_making = std::nullopt);
  static std::unique_ptr<BucketExchange> make(
      Group& group, const std::vector<Bucket>& buckets, Results results,
      milliseconds timeout) {
    return make(group, buckets, results, timeout, Arena());
  }
  // Whether every rank reaches every rank's arena, so that contributions may
  // lie there.
  bool moves() const { return !arenas_.empty(); }

  // Gives up the reduction that this rank is in, if any, and tells the others.
  // Never blocks.
  void abandon();
  // The same for all reductions to come, which other ranks may have begun. Only
  // destroy this afterwards.
  void abandon_all();
  // Gives up the reduction that this rank is in, if any, and waits until all
  // ranks have ended it, so that no peer uses this rank's buckets. Throws
  // CallMismatch if others have finished it.
  void reclaim();
  // Calls reclaim(), then begins a reduction. Throws std::invalid_argument
  // unless `divisor` is more than 0. `iteration` is the caller's count, which
  // advance() and finish() compare between the ranks: if one differs, all ranks
  // that come so far throw CallMismatch.
  void begin(int64_t iteration, double divisor);
  // Makes the errors use these words for iterations.
  void word_iterations(IterationWords words) { words_ = std::move(words); }
  // Publishes the next bucket, to which this rank's contribution is complete.
  // Never blocks. `places` has one element for each movable range of the
  // bucket, or none: the offset in this rank's arena, in bytes, where its
  // contribution lies and where its result shall be written; or kInBucket. That
  // memory does not belong to this rank until the reduction has ended.
  void publish(size_t bucket, std::span<const uint64_t> places = {});
  // Reduces what can be reduced, without blocking. Returns how many buckets,
  // from the first, hold their results. Throws CallMismatch, see begin().
  size_t advance() { return advance(std::memory_order_acquire); }
  // Waits until every bucket holds its results and no peer reads this rank's
  // buckets any more.
  void finish();

 private:
  // The counters of one rank. They count over all reductions; each lies on a
  // cache line of its own.
  struct Counters {
    alignas(64) std::atomic<uint64_t> published;
    // The caller's iteration. The two places are used in turn by the
    // reductions, because with one_shot a peer may be one reduction ahead of
    // this rank.
    std::atomic<int64_t> iterations[2];
    alignas(64) std::atomic<uint64_t> reduced;
    // The last reduction, counted from 1, that this rank has given up, and that
    // it has finished.
    alignas(64) std::atomic<uint64_t> given_up;
    std::atomic<uint64_t> finished;
    alignas(64) std::byte unused[64];  // processors fetch lines in pairs
  };
  static constexpr size_t kFixed = ~size_t{0};
  struct Part {
    Range elements;
    size_t movable;  // the movable range that contains it, or kFixed
  };
  // A bucket of all ranks. `owned` are this rank's ranges, equal slices too.
  struct MappedBucket : Bucket {
    std::vector<std::byte*> by_rank{};  // where each rank's data is
    std::vector<std::shared_ptr<std::byte>> held{};  // the peers' mappings
    // The bucket is so small that each rank copies its contribution beside the
    // counters and reduces all of it, so no rank waits for the results of
    // another.
    bool one_shot = false;
    size_t offset = 0;  // of the copy
    // `owned`, divided where movable ranges begin and end.
    std::vector<Part> parts{};
    size_t first_place =
        0;  // of its movable ranges, among those of all buckets
  };

  // `copy_bytes` is the size of one rank's copies in one reduction.
  struct Mapped {
    std::vector<MappedBucket> buckets{};
    size_t copy_bytes = 0;
    size_t places = 0;                 // movable ranges of all buckets
    std::vector<std::byte*> arenas{};  // by rank; empty if nothing moves
    std::vector<std::shared_ptr<std::byte>> held{};
  };
  static Mapped map(Core& core, const std::vector<Bucket>& buckets,
                    Results results, std::span<const BucketLayout> layouts);
  static void map_arenas(Core& core, Arena arena,
                         std::span<const BucketLayout> layouts, Mapped& mapped);
  BucketExchange(Group& group, Mapped mapped, Results results,
                 milliseconds timeout, milliseconds for_making);
  static std::vector<Part> parts_of(const Bucket& bucket);
  Counters& counters(int rank) const {
    return reinterpret_cast<Counters*>(memory_.data())[rank];
  }
  Counters& own() const;

  // Returns where rank `of`'s contribution is copied. Two places are used in
  // turn by the reductions, so that peers may still read one when the rank
  // writes the other.
  std::byte* copy_of(int of, const MappedBucket& bucket) const;
  size_t advance(std::memory_order order);
  void compare_iterations() const;
  // Returns whether `counter` of every rank covers `bucket`. `known` is a value
  // that `counter` of every rank is known to have reached.
  bool all_have(std::atomic<uint64_t> Counters::*counter, size_t bucket,
                uint64_t& known, std::memory_order order) const;
  void reduce(const MappedBucket& bucket) const;
  void reduce_copies(const MappedBucket& bucket) const;
  void reduce_piece(const MappedBucket& bucket, size_t movable,
                    Range elements) const;
  // Returns where rank `of`'s elements from `begin` on lie.
  std::byte* address(int of, const MappedBucket& bucket, size_t movable,
                     int64_t begin) const;
  // Returns where rank `of` says that its movable ranges lie. Written before
  // they are published, and read until the reduction has ended.
  uint64_t* places(int of) const;
  size_t progress() const { return next_ + complete_; }
  void await_progress(Patience& patience);
  using Missing = std::function<uint64_t(std::memory_order)>;
  // Returns the ranks, as bits, whose `counter` is less than `value`.
  uint64_t below(std::atomic<uint64_t> Counters::*counter, uint64_t value,
                 std::memory_order order) const;
  // Returns those of the ranks `missing` that have given up the reduction that
  // this rank is in.
  uint64_t given_up(uint64_t missing, std::memory_order order) const;
  void throw_if_given_up(const Missing& missing) const;
  // Waits until no rank is missing, or one that is missing has given up.
  void await(const Missing& missing, Patience& patience,
             const std::function<std::string()>& complaint) const;
  // The name of this reduction in errors.
  std::string begun() const;
  std::string bucket_name(size_t bucket) const;
  // Tells apart the wrappers that use such objects: " of 1234 elements".
  std::string size_in_words() const;

  Core& core_;
  const std::vector<MappedBucket> buckets_;
  const size_t copy_bytes_;
  const size_t places_;
  const std::vector<std::byte*> arenas_;
  const std::vector<std::shared_ptr<std::byte>> held_arenas_;
  const Results results_;
  const milliseconds timeout_;
  CommonMemory memory_;
  uint64_t rounds_ = 0;     // reductions that were begun
  bool open_ = false;       // begun, and neither finished nor reclaimed
  bool abandoned_ = false;  // given up, and the others were told
  int64_t iteration_ = 0;
  IterationWords words_;
  double divisor_ = 1;
  // The counters when this reduction began: the number of buckets in
  // all reductions before.
  uint64_t base_ = 0;
  uint64_t known_published_ = 0;  // all ranks have counted at least this
  uint64_t known_reduced_ = 0;
  size_t published_ = 0;  // by this rank, in this reduction
  size_t next_ = 0;       // the bucket to reduce next
  size_t complete_ = 0;
};

}  // namespace lockstep::internal::shm

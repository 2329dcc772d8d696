#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/bucket_exchange.h"
#include "tests/comm/shm/protocol_calls.h"

// Reductions by a BucketExchange; every bit of their results is checked.
namespace lockstep::internal::shm::testing {

struct BucketShape {
  size_t count;
  DType dtype = DType::float32;
};

// Must be the same on all ranks.
struct Rounds {
  std::vector<BucketShape> buckets;
  Results results = Results::everywhere;
  // Whether each rank names the pieces that it owns: pieces of odd sizes,
  // scattered over the buckets. Some ranks own nothing of a bucket.
  bool uneven_owners = false;
  // Whether each rank names an empty range, so that nobody owns anything.
  bool empty_ranges = false;
  // Whether pieces of the buckets are movable. Each rank has some of them in
  // its arena, others in each reduction, and at other places.
  bool moving = false;
  double divisor = 0;  // 0 means the number of ranks
  milliseconds timeout{60'000};
};

// One rank's buckets, in one region of registered memory, with guards between
// them.
class BucketRank {
 public:
  BucketRank(Group& group, const Values& values, Rounds rounds);
  ~BucketRank();
  BucketRank(const BucketRank&) = delete;
  BucketRank& operator=(const BucketRank&) = delete;

  BucketExchange& exchange() { return *exchange_; }

  // Runs a whole reduction. Throws std::runtime_error that names the first
  // wrong element. `between` is called before each publish().
  void run(uint64_t step, const std::function<void()>& between = {});
  // Begins a reduction and abandons it: publishes the first `publishes`
  // buckets, and advances as far as these allow.
  void abandon(uint64_t step, size_t publishes);

  std::vector<Range> owned_by(int rank, size_t bucket) const;

 private:
  void fill(uint64_t step, size_t bucket);
  void compare(uint64_t step, size_t bucket) const;
  void compare_guards() const;
  std::vector<Range> movable(size_t bucket) const;
  void choose_places(uint64_t step);
  // Returns where this rank's element lies in this reduction.
  std::byte* element_at(size_t bucket, int64_t element) const;
  const std::byte* contribution(uint64_t step, size_t bucket, int rank) const;

  Group& group_;
  const Values& values_;
  const Rounds rounds_;
  size_t bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::vector<std::byte*> data_;
  std::byte* arena_ = nullptr;
  size_t arena_bytes_ = 0;
  std::vector<std::vector<Range>> movable_;    // by bucket
  std::vector<std::vector<uint64_t>> places_;  // of these
  std::unique_ptr<BucketExchange> exchange_;
};

}  // namespace lockstep::internal::shm::testing

#include "lockstep/comm/bucket_reduction.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/collective_work.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/init.h"

namespace lockstep::internal {
namespace {

// Reduces each bucket by an all_reduce of its own.
class AllReducedBuckets final : public BucketReduction {
 public:
  AllReducedBuckets(std::vector<ReducedBucket> buckets, ProcessGroupPtr group)
      : buckets_(std::move(buckets)),
        group_(std::move(group)),
        alone_(group_->size() == 1) {
    works_.reserve(buckets_.size());
  }

  void begin(int64_t iteration, double divisor) override {
    if (!(divisor > 0)) {
      throw std::invalid_argument(
          c10::str("a reduction of buckets has the divisor ", divisor,
                   "; it must be more than 0"));
    }
    reclaim();
    if (!alone_ && group_->checks_calls()) compare(iteration);
    factor_ = 1 / divisor;
    works_.clear();
    published_ = complete_ = 0;
    open_ = true;
  }

  bool word_iterations(IterationWords words) override {
    words_ = std::move(words);
    return false;
  }

  // When a reduction is abandoned, some ranks have started more of its
  // all_reduces than others. Every rank starts the rest, so that its next
  // collective meets the same collective of its peers. A rank that has not
  // given up then gets NaN, and not a sum over two iterations.
  void reclaim() override {
    if (!open_) return;
    for (; published_ < buckets_.size(); ++published_) {
      if (alone_) continue;
      // The bucket itself may hold gradients that are still wanted.
      auto nothing = at::full_like(buckets_[published_].flat,
                                   std::numeric_limits<double>::quiet_NaN());
      works_.push_back(
          all_reduce(nothing, {.group = group_, .async_op = true}));
    }
    finish();
  }

  double contribution_factor() const override { return factor_; }

  using BucketReduction::publish;
  void publish(size_t bucket, std::span<const uint64_t> /*places*/) override {
    require_next(bucket);
    if (!alone_) {
      works_.push_back(all_reduce(buckets_[bucket].flat,
                                  {.group = group_, .async_op = true}));
    }
    ++published_;
  }

  void skip(size_t bucket) override {
    require_next(bucket);
    if (!alone_) works_.emplace_back();
    ++published_;
  }

  size_t advance() override {
    if (alone_) return published_;
    while (complete_ < works_.size() &&
           (!works_[complete_] || works_[complete_]->isCompleted())) {
      // wait() does what is left for the thread that waits, and throws if the
      // operation failed.
      if (works_[complete_]) works_[complete_]->wait();
      ++complete_;
    }
    return complete_;
  }

  void finish() override {
    if (!open_ || published_ != buckets_.size()) {
      throw std::logic_error(c10::str(published_, " of ", buckets_.size(),
                                      " buckets were published before "
                                      "finish()"));
    }
    for (; complete_ < works_.size(); ++complete_) {
      if (works_[complete_]) works_[complete_]->wait();
    }
    works_.clear();
    open_ = false;
  }

 private:
  void require_next(size_t bucket) const {
    if (open_ && bucket == published_ && bucket < buckets_.size()) return;
    throw std::logic_error(
        c10::str("bucket ", bucket, " was published after ", published_, " of ",
                 buckets_.size(),
                 " buckets; publish each once after begin(), in order"));
  }
  void compare(int64_t iteration) const {
    const auto iterations = gather_numbers(group_, {iteration});
    for (int rank = 1; rank < group_->size(); ++rank) {
      if (iterations[rank] == iterations[0]) continue;
      throw c10::DistBackendError(
          c10::str(words_.difference, ": rank ", group_->global_rank(0), " ",
                   words_.described(iterations[0][0]), ", rank ",
                   group_->global_rank(rank), " ",
                   words_.described(iterations[rank][0]), "; ", words_.remedy));
    }
  }

  const std::vector<ReducedBucket> buckets_;
  const ProcessGroupPtr group_;
  const bool alone_;
  IterationWords words_{};
  std::vector<WorkPtr> works_{};  // null if it is skipped
  size_t published_ = 0;
  size_t complete_ = 0;
  double factor_ = 1;
  bool open_ = false;
};

// Compares iterations by a reduction of one bucket, which is empty.
class IterationCheck final : public BucketReduction {
 public:
  explicit IterationCheck(std::unique_ptr<BucketReduction> reduction)
      : reduction_(std::move(reduction)) {}

  void begin(int64_t iteration, double divisor) override {
    reduction_->begin(iteration, divisor);
  }
  bool word_iterations(IterationWords words) override {
    return reduction_->word_iterations(std::move(words));
  }
  void abandon() override { reduction_->abandon(); }
  void abandon_all() override { reduction_->abandon_all(); }
  void reclaim() override { reduction_->reclaim(); }
  double contribution_factor() const override {
    return reduction_->contribution_factor();
  }
  using BucketReduction::publish;
  void publish(size_t bucket, std::span<const uint64_t> /*places*/) override {
    throw std::logic_error(
        c10::str("bucket ", bucket, " was published; there are none"));
  }
  size_t advance() override { return 0; }
  void finish() override {
    reduction_->publish(0);
    reduction_->finish();
  }

 private:
  const std::unique_ptr<BucketReduction> reduction_;
};

// Returns the buckets with complex numbers as pairs of reals.
std::vector<ReducedBucket> as_real(std::vector<ReducedBucket> buckets) {
  for (auto& [flat, owned, movable] : buckets) {
    if (!flat.is_complex()) continue;
    flat = at::view_as_real(flat).view({-1});
    for (auto* ranges : {&owned, &movable}) {
      for (auto& [begin, end] : *ranges) {
        begin *= 2;
        end *= 2;
      }
    }
  }
  return buckets;
}

// Whether the kernels can reduce the bucket.
bool is_shareable(const ReducedBucket& bucket) {
  const auto dtype = bucket.flat.scalar_type();
  return bucket.flat.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble ||
                                  dtype == at::kHalf || dtype == at::kBFloat16);
}

}  // namespace

std::unique_ptr<BucketReduction> all_reduce_buckets(
    std::vector<ReducedBucket> buckets, ProcessGroupPtr group) {
  return std::make_unique<AllReducedBuckets>(
      as_real(std::move(buckets)), group_or_default(std::move(group)));
}

std::unique_ptr<BucketReduction> make_bucket_reduction(
    std::vector<ReducedBucket> buckets, Results results,
    const ProcessGroupPtr& group, const at::Tensor& arena) {
  const auto of = group_or_default(group);
  buckets = as_real(std::move(buckets));
  auto* sharing = host_sharing(of);
  if (sharing != nullptr && of->size() > 1 && !of->checks_calls() &&
      std::ranges::all_of(buckets, is_shareable)) {
    std::unique_ptr<BucketReduction> reduction;
    run_step(Call("make_bucket_reduction", of, of->timeout()), [&] {
      reduction =
          sharing->reduce_buckets(buckets, results, of, of->timeout(), arena);
    });
    if (reduction) return reduction;
  }
  return all_reduce_buckets(std::move(buckets), of);
}

std::unique_ptr<BucketReduction> make_iteration_check(
    const ProcessGroupPtr& group, bool on_cpu) {
  const auto of = group_or_default(group);
  if (!on_cpu || host_sharing(of) == nullptr || of->size() == 1 ||
      of->checks_calls()) {
    return all_reduce_buckets({}, of);
  }
  return std::make_unique<IterationCheck>(make_bucket_reduction(
      {{.flat = at::empty({0}, at::kFloat)}}, Results::everywhere, of));
}

}  // namespace lockstep::internal

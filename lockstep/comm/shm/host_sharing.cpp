#include "lockstep/comm/host_sharing.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <utility>

#include "lockstep/base/current_call.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/shm/backend.h"
#include "lockstep/comm/shm/piece.h"
#include "lockstep/comm/shm/protocol/arrivals.h"
#include "lockstep/comm/shm/protocol/bucket_exchange.h"
#include "lockstep/comm/shm/shared_tensors.h"

namespace lockstep {

HostSharing* host_sharing(const ProcessGroupPtr& group) {
  const auto& of = group ? group : default_group();
  if (!of->has_backend(c10::kCPU)) return nullptr;
  return dynamic_cast<HostSharing*>(&of->backend(c10::kCPU));
}

bool takes_lists_at_once(const c10d::Backend& backend) {
  return dynamic_cast<const HostSharing*>(&backend) != nullptr;
}

namespace shm {
namespace {

// Throws in a child that was forked after `made_in` was made. The child has
// copies of objects that stand for the parent's memory, which it must not write
// to.
void refuse_in_child(const ProcessMark& made_in) {
  if (!made_in.is_foreign()) return;
  throw std::runtime_error(
      "memory that ranks share is used in a process that was forked from a "
      "rank; use it in the rank itself only");
}

class SharedBuckets final : public BucketReduction {
 public:
  SharedBuckets(std::shared_ptr<Group> group,
                std::vector<ReducedBucket> buckets,
                std::unique_ptr<BucketExchange> exchange)
      : group_(std::move(group)),
        buckets_(std::move(buckets)),
        exchange_(std::move(exchange)) {}

  void begin(int64_t iteration, double divisor) override {
    refuse_in_child(made_in_);
    translated([&] { exchange_->begin(iteration, divisor); });
  }
  void abandon() override {
    if (!made_in_.is_foreign()) exchange_->abandon();
  }
  void reclaim() override {
    refuse_in_child(made_in_);
    translated([&] { exchange_->reclaim(); });
  }
  double contribution_factor() const override { return 1; }
  void publish(size_t bucket) override {
    refuse_in_child(made_in_);
    exchange_->publish(bucket);
  }
  size_t advance() override {
    refuse_in_child(made_in_);
    size_t complete = 0;
    translated([&] { complete = exchange_->advance(); });
    return complete;
  }
  void finish() override {
    refuse_in_child(made_in_);
    translated([&] { exchange_->finish(); });
  }

 private:
  const ProcessMark made_in_{};
  // exchange_ uses the other two, so it is declared last and destroyed first.
  const std::shared_ptr<Group> group_;
  const std::vector<ReducedBucket> buckets_;
  const std::unique_ptr<BucketExchange> exchange_;
};

class SharedBarrier final : public SplitBarrier {
 public:
  SharedBarrier(std::shared_ptr<Group> group, milliseconds timeout)
      : group_(std::move(group)), arrivals_(*group_, timeout) {}

  void arrive() override {
    if (!made_in_.is_foreign()) arrivals_.arrive();
  }
  void wait(milliseconds timeout) override {
    refuse_in_child(made_in_);
    CurrentCall current{.operation = "split_barrier",
                        .function = user_function()};
    const CurrentCallScope scope(&current);
    translated([&] { arrivals_.wait(timeout); });
  }

 private:
  const ProcessMark made_in_{};
  const std::shared_ptr<Group> group_;
  Arrivals arrivals_;
};

// What the tensors of zeros_in_common() keep alive.
struct CommonTensor {
  std::shared_ptr<Group> group;
  CommonMemory memory;
};

std::vector<ExchangedBucket> exchanged(
    const std::vector<ReducedBucket>& buckets) {
  std::vector<ExchangedBucket> result;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const auto& [flat, owned] = buckets[i];
    if (!flat.defined() || !flat.device().is_cpu() ||
        flat.layout() != at::kStrided || !flat.is_contiguous() ||
        !kernels::is_floating(moved_as(flat.scalar_type()))) {
      throw std::invalid_argument(c10::str(
          "reduce_buckets: bucket ", i, " is ",
          flat.defined() ? flat.toString() : "undefined",
          "; give contiguous cpu tensors of float, double, half or bfloat16"));
    }
    ExchangedBucket bucket{.data = flat.data_ptr(),
                           .count = static_cast<size_t>(flat.numel()),
                           .dtype = moved_as(flat.scalar_type()),
                           .owned = {}};
    for (const auto& [begin, end] : owned) {
      bucket.owned.push_back({.begin = static_cast<size_t>(begin),
                              .end = static_cast<size_t>(end)});
    }
    result.push_back(std::move(bucket));
  }
  return result;
}

}  // namespace

std::unique_ptr<BucketReduction> Backend::reduce_buckets(
    std::vector<ReducedBucket> buckets, Results results, milliseconds timeout) {
  const auto given = exchanged(buckets);
  const auto where = results == Results::everywhere
                         ? BucketExchange::Results::everywhere
                         : BucketExchange::Results::owned;
  std::unique_ptr<BucketExchange> exchange;
  run_in_turn(timeout, [&] {
    exchange = BucketExchange::make(*group_, given, where, timeout);
  });
  if (!exchange) return nullptr;
  return std::make_unique<SharedBuckets>(group_, std::move(buckets),
                                         std::move(exchange));
}

std::unique_ptr<SplitBarrier> Backend::split_barrier(milliseconds timeout) {
  std::unique_ptr<SplitBarrier> barrier;
  run_in_turn(timeout, [&] {
    barrier = std::make_unique<SharedBarrier>(group_, timeout);
  });
  return barrier;
}

at::Tensor Backend::zeros_in_common(int64_t count,
                                    const at::TensorOptions& options,
                                    milliseconds timeout) {
  if (count < 0 || !options.device().is_cpu()) {
    throw std::invalid_argument(c10::str("zeros_in_common: ", count,
                                         " elements on ", options.device(),
                                         "; give 0 or more on cpu"));
  }
  const size_t bytes = static_cast<size_t>(count) * options.dtype().itemsize();
  if (bytes == 0) return at::empty({count}, options);
  std::shared_ptr<CommonTensor> held;
  run_in_turn(timeout, [&] {
    held.reset(
        new CommonTensor{.group = group_, .memory = {*group_, bytes, timeout}});
  });
  auto* data = held->memory.data();
  shared_->add(data, bytes);
  return at::from_blob(
      data, {count},
      [held = std::move(held), shared = shared_](void* given) {
        shared->remove(given);
      },
      options);
}

}  // namespace shm
}  // namespace lockstep

#include "lockstep/parallel/ddp/hook_reduction.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <utility>

namespace lockstep {
namespace {

class HookReduction final : public BucketReduction {
 public:
  HookReduction(const std::vector<Bucket>& buckets,
                const std::vector<NamedParameter>& parameters, CommHook hook)
      : buckets_(buckets), parameters_(parameters), hook_(std::move(hook)) {}

  void begin(double /*divisor*/) override {
    reclaim();
    final_ = 0;
  }

  // Of an abandoned round: what is under way may still write into buckets.
  void reclaim() override {
    for (const auto& future : futures_) future->wait();
    futures_.clear();
  }

  double contribution_factor() const override { return 1; }

  void publish(size_t bucket) override {
    const auto& [flat, slots] = buckets_[bucket];
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> parameters;
    for (const auto& slot : slots) {
      gradients.push_back(slot.alias);
      parameters.push_back(parameters_[slot.parameter].tensor);
    }
    const auto passed = std::make_shared<GradBucket>(
        bucket, bucket + 1 == buckets_.size(), flat, std::move(gradients),
        std::move(parameters));
    auto future = hook_(*passed);
    if (!future) {
      throw std::invalid_argument(
          "the communication hook returned no future; return "
          "completed_future(bucket.buffer()) where nothing is to be waited "
          "for");
    }
    // Continuations may use the bucket until then, abandoned rounds' too.
    future->addCallback([passed](c10::ivalue::Future&) {});
    futures_.push_back(std::move(future));
  }

  size_t advance() override {
    while (final_ < futures_.size() && futures_[final_]->completed()) take();
    return final_;
  }

  void finish() override {
    while (final_ < futures_.size()) take();
    futures_.clear();
  }

 private:
  void take() {
    const auto& flat = buckets_[final_].flat;
    const auto value = wait_for_tensor(futures_[final_]);
    if (value.numel() != flat.numel()) {
      throw std::invalid_argument(c10::str(
          "the communication hook's future gave ", value.numel(),
          " elements for bucket ", final_, ", which has ", flat.numel()));
    }
    if (!value.is_same(flat)) flat.copy_(value.reshape(flat.sizes()));
    ++final_;
  }

  const std::vector<Bucket>& buckets_;
  const std::vector<NamedParameter>& parameters_;
  CommHook hook_;
  std::vector<CommFuture> futures_{};
  size_t final_ = 0;
};

}  // namespace

std::unique_ptr<BucketReduction> hook_buckets(
    const std::vector<Bucket>& buckets,
    const std::vector<NamedParameter>& parameters, CommHook hook) {
  return std::make_unique<HookReduction>(buckets, parameters, std::move(hook));
}

}  // namespace lockstep

#include "lockstep/parallel/ddp/hook_reduction.h"

#include <ATen/ATen.h>

#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/collectives.h"

namespace lockstep::internal {
namespace {

class HookReduction final : public BucketReduction {
 public:
  HookReduction(const std::vector<GradientBucket>& buckets,
                const std::vector<NamedParameter>& parameters, CommHook hook,
                ProcessGroupPtr group)
      : buckets_(buckets),
        parameters_(parameters),
        hook_(std::move(hook)),
        group_(std::move(group)),
        check_(make_iteration_check(group_, all_on_cpu(parameters))) {}

  void begin(int64_t iteration, double divisor) override {
    reclaim();
    check_->begin(iteration, divisor);
    final_ = 0;
    begun_ = true;
  }

  bool word_iterations(IterationWords words) override {
    return check_->word_iterations(std::move(words));
  }

  void abandon() override {
    abandoned_ |= begun_;
    check_->abandon();
  }

  // Operations of an abandoned reduction may still write into the buckets, so
  // this waits for them.
  void reclaim() override {
    if (abandoned_ && group_->size() > 1) meet();
    check_->reclaim();  // after meet(): until then peers may be in a hook
    for (size_t i = 0; i < futures_.size(); ++i) {
      await(i);
      try {
        futures_[i]->wait();  // on a GPU: for its stream
      } catch (const std::exception&) {
        if (!abandoned_) throw;
      }
    }
    futures_.clear();
    abandoned_ = begun_ = false;
  }

  double contribution_factor() const override { return 1; }

  using BucketReduction::publish;
  void publish(size_t bucket, std::span<const uint64_t> /*places*/) override {
    const auto& [flat, slots, stream] = buckets_[bucket];
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;
    for (const auto& slot : slots) {
      gradients.push_back(slot.alias);
      parameters.push_back(parameters_[slot.parameter].tensor);
      names.push_back(parameters_[slot.parameter].name);
    }
    const auto passed = std::make_shared<GradBucket>(
        bucket, bucket + 1 == buckets_.size(), flat, std::move(gradients),
        std::move(parameters), std::move(names));
    auto future = hook_(*passed);
    if (!future) {
      throw std::invalid_argument(
          "the communication hook returned no future; return "
          "completed_future(bucket.buffer()) if there is nothing to wait for");
    }
    // Continuations may use the bucket until the future completes, also those
    // of an abandoned reduction.
    future->addCallback([passed](c10::ivalue::Future&) {});
    futures_.push_back(std::move(future));
  }

  void skip(size_t bucket) override {
    futures_.push_back(completed_future(buckets_[bucket].flat));
  }

  // A future of a device's tensors completes when its operations are enqueued.
  // To wait for them now would hold up the backward on its own stream.
  size_t advance() override {
    while (final_ < futures_.size() && buckets_[final_].flat.is_cpu() &&
           futures_[final_]->completed()) {
      take();
    }
    return final_;
  }

  void finish() override {
    check_->finish();
    while (final_ < futures_.size()) take();
    futures_.clear();
    begun_ = false;
  }

 private:
  // Returns when all ranks have given up. A rank that has not is still in a
  // collective of its hook; that collective meets this all-gather, instead of
  // one of the next reduction. If the backend compares calls, that rank throws
  // there, gives up, and comes here, too. This can happen once for each
  // collective that its hook had begun, so there are that many attempts.
  void meet() const {
    const auto one =
        at::TensorOptions(at::kInt).device(group_->control_device());
    for (size_t left = buckets_.size();; --left) {
      auto all = at::empty({group_->size()}, one);
      try {
        all_gather_into_tensor(all, at::zeros({1}, one), {.group = group_});
        return;
      } catch (const c10::DistError&) {
        if (left == 0) throw;
      }
    }
  }

  // Waits with a deadline, which c10's futures cannot.
  void await(size_t bucket) const {
    const auto& future = futures_[bucket];
    if (future->completed()) return;
    struct Arrival {
      std::mutex mutex;
      std::condition_variable changed;
      bool here = false;
    };
    const auto arrival = std::make_shared<Arrival>();
    future->addCallback([arrival](c10::ivalue::Future&) {
      const std::lock_guard lock(arrival->mutex);
      arrival->here = true;
      arrival->changed.notify_all();
    });
    const auto allowed = kChained * group_->timeout();
    std::unique_lock lock(arrival->mutex);
    if (arrival->changed.wait_for(lock, allowed,
                                  [&] { return arrival->here; })) {
      return;
    }
    throw c10::DistBackendError(
        c10::str("rank ", group_->global_rank(group_->rank()),
                 ": the communication hook's future for bucket ", bucket,
                 " was not complete after ", allowed.count(),
                 " ms; complete it, or give the group a longer timeout"));
  }

  void take() {
    const auto& flat = buckets_[final_].flat;
    await(final_);
    const auto value = wait_for_tensor(futures_[final_]);
    if (!value.defined()) {
      throw std::invalid_argument(
          c10::str("the communication hook's future gave an undefined tensor "
                   "for bucket ",
                   final_, "; give the bucket's reduced gradients"));
    }
    if (value.numel() != flat.numel()) {
      throw std::invalid_argument(c10::str(
          "the communication hook's future gave ", value.numel(),
          " elements for bucket ", final_, ", which has ", flat.numel()));
    }
    if (!value.is_same(flat)) flat.copy_(value.reshape(flat.sizes()));
    ++final_;
  }

  const std::vector<GradientBucket>& buckets_;
  const std::vector<NamedParameter>& parameters_;
  CommHook hook_;
  const ProcessGroupPtr group_;
  const std::unique_ptr<BucketReduction> check_;
  std::vector<CommFuture> futures_{};
  size_t final_ = 0;
  bool begun_ = false;
  bool abandoned_ = false;
};

}  // namespace

std::unique_ptr<BucketReduction> hook_buckets(
    const std::vector<GradientBucket>& buckets,
    const std::vector<NamedParameter>& parameters, CommHook hook,
    ProcessGroupPtr group) {
  return std::make_unique<HookReduction>(buckets, parameters, std::move(hook),
                                         std::move(group));
}

}  // namespace lockstep::internal

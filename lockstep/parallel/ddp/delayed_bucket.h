#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep::internal {

// Gradients that are averaged apart from all others, when the gradient of one
// named parameter is ready (delay_all_reduce_named_params of
// DistributedDataParallel). One thread at a time.
class DelayedBucket {
 public:
  // Collective. `parameters` must have one dtype and device and be the same on
  // every rank. `hook`: the parameter whose gradient starts the reduction, one
  // of the reducer's or of these.
  DelayedBucket(std::vector<NamedParameter> parameters, at::Tensor hook,
                const ProcessGroupPtr& group);

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  const at::Tensor& hook() const { return hook_; }
  // See BucketReduction.
  void word_iterations(IterationWords words) {
    reduction_->word_iterations(std::move(words));
  }
  // Called at the start of every averaging backward; see BucketReduction.
  void begin(int64_t iteration, double divisor) {
    reduction_->begin(iteration, divisor);
    started_ = false;
  }
  // Takes and publishes the gradients. They must exist: std::runtime_error
  // names the first that is missing. Does not block.
  void start();
  // Waits until the gradients are averaged. Throws std::runtime_error without
  // start().
  void finish();
  // Called when a backward was given up: drops gradients that peers may still
  // write.
  void give_up();
  // See BucketReduction.
  void reclaim() { reduction_->reclaim(); }
  // Does what start() does, with zeros, on a rank that has joined.
  void shadow();

 private:
  std::vector<NamedParameter> parameters_;
  at::Tensor hook_;
  int rank_;
  GradientBucket bucket_;
  std::unique_ptr<BucketReduction> reduction_;
  bool started_ = false;
};

}  // namespace lockstep::internal

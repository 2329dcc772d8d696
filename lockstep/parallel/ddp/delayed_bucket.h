#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep {

// Gradients that are averaged apart from all others, when that of one named
// parameter is ready (delay_all_reduce_named_params of
// DistributedDataParallel). Not for several threads.
class DelayedBucket {
 public:
  // Collective. `parameters` of one dtype and device, the same on every rank;
  // `hook`: whose gradient starts it, one of the reducer's or of these.
  DelayedBucket(std::vector<NamedParameter> parameters, at::Tensor hook,
                const ProcessGroupPtr& group);

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  const at::Tensor& hook() const { return hook_; }
  // At the begin of every backward that averages; see BucketReduction.
  void begin(int64_t iteration, double divisor) {
    reduction_->begin(iteration, divisor);
    started_ = false;
  }
  // The gradients, which must be there (std::runtime_error names what is
  // missing), are taken and published. Does not block.
  void start();
  // Until they are averaged. Throws std::runtime_error without start().
  void finish();
  // A backward was given up: gradients that peers may still write go.
  void give_up();
  // See BucketReduction.
  void reclaim() { reduction_->reclaim(); }
  // As start() and finish(), of zeros, on a rank that has joined.
  void shadow();

 private:
  std::vector<NamedParameter> parameters_;
  at::Tensor hook_;
  int rank_;
  Bucket bucket_;
  std::unique_ptr<BucketReduction> reduction_;
  bool started_ = false;
};

}  // namespace lockstep

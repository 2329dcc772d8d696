#pragma once

#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/span.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep {

// Averages gradients over the ranks of a group while backward computes them.
//
// A hook on each parameter marks its gradient ready. The gradient lies in a
// bucket: either autograd accumulated it there (.grad is an alias into the
// bucket), or, after zero_grad(set_to_none=true), it is a fresh tensor that
// one pass copies and divides by the group's size, and .grad becomes the alias
// again. The last ready parameter of a bucket starts its all-reduce; the end
// of backward waits for them all. Buckets are started in their order on every
// rank, whatever the order of readiness.
//
// The first backward has one bucket for each dtype and device: in which order
// gradients become ready is not known yet. Behind the first synchronised
// backward buckets are made once more, in the order in which rank 0's became
// ready, as large as the limits say.
//
// The operations, their order, sizes and dtypes are those of Python's
// DistributedDataParallel (its gradient reducer), so that Python ranks may
// stand in the group.
//
// Threads: the methods are for the thread that trains; hooks run on autograd's.
class Reducer {
 public:
  // `parameters`: leaves that require grad, the same on every rank (see
  // verify_same_model).
  Reducer(std::vector<NamedParameter> parameters, ProcessGroupPtr group,
          const BucketLimits& limits);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  // Before each forward. `synchronize`: whether the backward that follows is to
  // average, or only accumulates on this rank (no_sync). Collective when it
  // rebuilds the buckets: behind the first backward that averaged.
  void prepare(bool synchronize);

  // The parameters' names, bucket by bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const;

 private:
  // Where a parameter's gradient lies, and what this backward knows of it.
  struct Place {
    size_t bucket = 0;
    size_t slot = 0;
    bool ready = false;
    // Autograd accumulated in place: the bucket holds it undivided.
    bool undivided = false;
  };

  void set_buckets(const std::vector<std::vector<size_t>>& buckets);
  void rebuild_buckets();
  void start_backward();
  void mark_ready(size_t parameter);
  void take_gradient(size_t parameter);
  void start_reduction(Bucket& bucket);
  void finish_backward();
  void reset_backward();
  std::string names_without_gradient() const;

  std::vector<at::Tensor> tensors() const;
  std::string this_rank() const;

  std::vector<NamedParameter> parameters_;
  ProcessGroupPtr group_;
  BucketLimits limits_;
  // 1 / the group's size, made once, as every gradient is multiplied by it.
  at::Tensor share_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter

  struct Hook {
    // LibTorch's own handle: its type differs between releases.
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    uintptr_t key;
  };
  std::vector<Hook> hooks_;

  // GPU gradients are ready on autograd's device threads.
  mutable std::mutex mutex_;
  bool synchronize_ = true;
  bool in_backward_ = false;
  // From the first gradient to the last averaged one.
  std::optional<Span> backward_span_;
  std::vector<size_t> pending_;  // parameters not ready, by bucket
  size_t next_bucket_ = 0;       // the first that is not started
  std::vector<WorkPtr> works_;
  std::vector<size_t> ready_order_;
  bool rebuilt_ = false;
};

}  // namespace lockstep

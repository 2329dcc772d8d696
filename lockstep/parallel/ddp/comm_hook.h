#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace lockstep {

// One bucket of gradients as a communication hook sees it; after
// torch.distributed.GradBucket. Valid during the hook and until its future has
// completed.
class GradBucket {
 public:
  GradBucket(size_t index, bool is_last, at::Tensor buffer,
             std::vector<at::Tensor> gradients,
             std::vector<at::Tensor> parameters)
      : index_(index),
        is_last_(is_last),
        buffer_(std::move(buffer)),
        gradients_(std::move(gradients)),
        parameters_(std::move(parameters)) {}

  // Its place in the order in which all ranks reduce; 0 is the first to be
  // ready in backward. Buckets change once, behind the first synchronised
  // backward (index, sizes and all); see is_last().
  size_t index() const { return index_; }
  // Of this backward.
  bool is_last() const { return is_last_; }
  // [sum of numel], contiguous: this rank's gradients, not divided by the
  // group's size.
  const at::Tensor& buffer() const { return buffer_; }
  // For hooks that wrap another, on a copy of the bucket: `buffer` ([sum of
  // numel], contiguous, of any dtype) stands for the gradients there. What is
  // reduced is the future's value, whatever was set. Throws
  // std::invalid_argument if it has another shape.
  void set_buffer(at::Tensor buffer);
  // Aliases into buffer(), one behind the other, with the parameters' shapes
  // and, where those are dense, strides.
  const std::vector<at::Tensor>& gradients() const { return gradients_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> parameters_;
};

// Completes with one tensor (or a list of one, as Work::getFuture() gives): the
// bucket's reduced gradients, of buffer()'s number of elements; what is not
// buffer() itself is copied into it, whatever its dtype.
using CommFuture = c10::intrusive_ptr<c10::ivalue::Future>;

// Called in backward for each bucket, in order on every rank, instead of the
// averaging all-reduce; dividing is the hook's affair. After
// DistributedDataParallel.register_comm_hook (PyTorch documentation, "DDP
// Communication Hooks"). Must not wait for peers where it can be avoided: it
// returns a future, which is waited for at the end of backward. What it throws
// comes out of backward().
using CommHook = std::function<CommFuture(GradBucket& bucket)>;

// Of a value that is there already.
CommFuture completed_future(const at::Tensor& value);
// The value of a completed future as one tensor; waits. Throws what the future
// failed with, or std::invalid_argument if it is anything else than one tensor
// or a list of one.
at::Tensor wait_for_tensor(const CommFuture& future);

}  // namespace lockstep

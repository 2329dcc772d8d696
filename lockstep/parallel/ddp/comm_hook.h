#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// One bucket of gradients for a communication hook, like
// torch.distributed.GradBucket. Valid during the hook and until its future has
// completed.
class GradBucket {
 public:
  GradBucket(size_t index, bool is_last, at::Tensor buffer,
             std::vector<at::Tensor> gradients,
             std::vector<at::Tensor> parameters,
             std::vector<std::string> parameter_names = {})
      : index_(index),
        is_last_(is_last),
        buffer_(std::move(buffer)),
        gradients_(std::move(gradients)),
        parameters_(std::move(parameters)),
        parameter_names_(std::move(parameter_names)) {}

  // Returns its place in the order in which all ranks reduce; bucket 0 is the
  // first to be ready in backward. Buckets (index, sizes and all) change after
  // the first averaging backward, and whenever other parameters are trained
  // (requires_grad); see is_last().
  size_t index() const { return index_; }
  // Returns whether this is the last bucket of this backward.
  bool is_last() const { return is_last_; }
  // Returns this rank's gradients, [sum of numel], contiguous, not divided by
  // the group's size.
  const at::Tensor& buffer() const { return buffer_; }
  // Replaces the gradients by `buffer` ([sum of numel], contiguous, of any
  // dtype). For hooks that wrap another hook and pass it a copy of the bucket.
  // The reduced gradients are always the future's value, whatever was set here.
  // Throws std::invalid_argument if `buffer` has another shape.
  void set_buffer(at::Tensor buffer);
  // Returns aliases into buffer(), one after the other, with the parameters'
  // shapes and, for dense parameters, their strides.
  const std::vector<at::Tensor>& gradients() const { return gradients_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Returns the names that the parameters have in the wrapper's module, by
  // which a hook can keep something for each.
  const std::vector<std::string>& parameter_names() const {
    return parameter_names_;
  }

 private:
  size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> parameter_names_;
};

// Completes with one tensor (or a list of one, as Work::getFuture() gives): the
// bucket's reduced gradients, with as many elements as buffer(). A tensor other
// than buffer() is copied into it, whatever its dtype.
using CommFuture = c10::intrusive_ptr<c10::ivalue::Future>;

// Called in backward for each bucket, in the same order on every rank, instead
// of the averaging all-reduce. The wrapper does not divide by the number of
// ranks then: a hook that averages must divide itself. It follows
// DistributedDataParallel.register_comm_hook (PyTorch documentation, "DDP
// Communication Hooks"). A hook should not wait for peers if it can avoid it,
// but return a future, which is waited for at the end of backward. An exception
// from the hook comes out of backward().
using CommHook = std::function<CommFuture(GradBucket& bucket)>;

// Returns a future that has completed with `value`.
CommFuture completed_future(const at::Tensor& value);
// Waits for the future and returns its value as one tensor. Throws the future's
// error, or std::invalid_argument if its value is not one tensor or a list of
// one.
at::Tensor wait_for_tensor(const CommFuture& future);

}  // namespace lockstep

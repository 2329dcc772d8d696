#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

struct NamedParameter {
  std::string name;  // as named_parameters() gives it
  at::Tensor tensor;
};

// Gradients of several parameters in one storage, so that one reduction moves
// them all. After Li et al., "PyTorch Distributed: Experiences on Accelerating
// Data Parallel Training" (VLDB 2020), section 3.2.3.
struct Bucket {
  // One parameter's place in `flat`. `alias` shares the storage of `flat`, has
  // the parameter's sizes and, where that is dense, its strides, and is what
  // the parameter's .grad becomes. It is no view of autograd's (is_view() is
  // false): LibTorch's zero_grad() calls detach_(), which throws on views.
  struct Slot {
    size_t parameter;  // index into the parameters the buckets were made of
    int64_t offset;    // of its first element in `flat`
    at::Tensor alias;
  };
  at::Tensor flat;  // [sum of numel], contiguous
  std::vector<Slot> slots;
};

// Bytes at which the buckets of a dtype and device are full: the first, the
// second, ..., and the last limit for all others. Not empty.
using BucketLimits = std::vector<int64_t>;

// Splits `order` (indices into `tensors`) into runs of one dtype and device.
// A run ends with the tensor that brings it to its limit, as in Python, with
// whose ranks the sizes must agree. Runs come in the order in which their last
// tensor stands in `order`: that of readiness, if `order` is.
std::vector<std::vector<size_t>> assign_buckets(
    const std::vector<at::Tensor>& tensors, const std::vector<size_t>& order,
    const BucketLimits& limits);

// Allocates one bucket for `members`, zeroed, in memory that the ranks of
// `group` share where they have some (empty_shared()). `dtype`: of the bucket;
// none: the parameters'.
Bucket make_bucket(const std::vector<NamedParameter>& parameters,
                   const std::vector<size_t>& members,
                   const ProcessGroupPtr& group,
                   std::optional<at::ScalarType> dtype = {});

// True if `tensor` is exactly the memory of `alias`.
bool same_memory(const at::Tensor& tensor, const at::Tensor& alias);

}  // namespace lockstep

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

struct NamedParameter {
  std::string name;  // as named_parameters() gives it
  at::Tensor tensor;
};

bool all_on_cpu(const std::vector<NamedParameter>& parameters);

// Gradients of several parameters in one storage, so that one reduction moves
// them all. It follows Li et al., "PyTorch Distributed: Experiences on
// Accelerating Data Parallel Training" (VLDB 2020), section 3.2.3.
struct GradientBucket {
  // The place of one parameter in `flat`, with the parameter's sizes and, if
  // the parameter is dense, its strides.
  struct Slot {
    size_t parameter;  // index into the parameters of the buckets
    int64_t offset;    // of its first element in `flat`
    at::Tensor place;  // shares the storage of `flat`; users never get it
    // Becomes the parameter's .grad, so users may keep it and change it. It is
    // not an autograd view (is_view() is false), because LibTorch's zero_grad()
    // calls detach_(), which throws for views. Its storage is the same memory,
    // but an object of its own, which all tensors share that users made of it.
    at::Tensor alias;
    c10::Storage storage;

    // Makes a new alias if anyone but this slot holds the old one or a tensor
    // made of it, or has changed it; what is held keeps its values in memory of
    // its own. Call it before writing what is not the gradient that they hold,
    // and before alias becomes .grad.
    void release();
  };
  at::Tensor flat;  // [sum of numel], contiguous
  std::vector<Slot> slots;
};

// The sizes in bytes at which the buckets of a dtype and device are full: the
// first bucket, the second, ...; the last limit is for all others. Not empty.
using BucketLimits = std::vector<int64_t>;

// Splits `order` (indices into `tensors`) into runs of one dtype and device. A
// run ends with the tensor that brings it to its limit, as in Python, with
// whose ranks the sizes must agree. Runs are sorted by the place of their last
// tensor in `order`; so they become full in this order if `order` is that of
// readiness.
std::vector<std::vector<size_t>> assign_buckets(
    const std::vector<at::Tensor>& tensors, const std::vector<size_t>& order,
    const BucketLimits& limits);

// Allocates one bucket for `members`, zeroed, in memory that the ranks of
// `group` share if there is any (empty_shared()). `dtype`: the dtype of the
// bucket; none means that of the parameters.
GradientBucket make_bucket(const std::vector<NamedParameter>& parameters,
                           const std::vector<size_t>& members,
                           const ProcessGroupPtr& group,
                           std::optional<at::ScalarType> dtype = {});

// Returns whether `tensor` is exactly the memory of `place`.
bool same_memory(const at::Tensor& tensor, const at::Tensor& place);

// Returns the buckets of the first backward, for the `members` among `tensors`.
// Gradients mostly become ready in reverse order of the parameters, so these
// buckets are in that order. Without `limits` there is one bucket for each
// dtype and device.
std::vector<std::vector<size_t>> first_buckets(
    const std::vector<at::Tensor>& tensors, const std::vector<size_t>& members,
    const BucketLimits& limits);

// Collective. Returns the buckets of rank 0; their number may differ from ours,
// but they have as many members in all. They are sent in two parts, of which
// the first has the same length on every rank: all members and the number of
// buckets; then the lengths of the buckets. On the wire as in Python, in
// tensors on `device`.
std::vector<std::vector<size_t>> order_of_rank_zero(
    const std::vector<std::vector<size_t>>& buckets, c10::Device device,
    const ProcessGroupPtr& group);

// Looks for NaN and infinity in what each rank contributes to a reduction, and
// makes all ranks fail alike. One thread at a time.
class GradientCheck {
 public:
  // `parameters`: those to which the slots' indices refer; must outlive this.
  GradientCheck(const std::vector<NamedParameter>& parameters,
                ProcessGroupPtr group);

  // Checks this rank's contribution, before it is published.
  void look(const GradientBucket& bucket);
  void look(size_t parameter, const at::Tensor& gradient);
  // Forgets what was seen in a backward that was given up.
  void forget() { found_ = -1; }
  // Collective, at the end of a backward, before a gradient is used. If any
  // rank saw NaN or infinity, throws std::runtime_error on all ranks, with
  // rank, parameter and `step`; if several did, it reports the lowest rank's
  // first.
  void agree(int64_t step);

 private:
  const std::vector<NamedParameter>& parameters_;
  ProcessGroupPtr group_;
  int64_t found_ = -1;  // index of a parameter; -1 if there is none
  bool is_nan_ = false;
};

}  // namespace lockstep::internal

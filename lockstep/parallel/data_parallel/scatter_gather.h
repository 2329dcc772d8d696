#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace torch::nn {
struct ASMoutput;
}

// Divides the arguments of DataParallel's forward and joins its results.
namespace lockstep {

// Divides the arguments of one call over devices.
class Scatter {
 public:
  // `devices`: not empty. `dim`: the dimension of each tensor; negative numbers
  // count from its end.
  Scatter(std::vector<at::Device> devices, int64_t dim);

  // Divides as at::chunk does: pieces along the dimension, each of ceil(size /
  // devices) rows except the last, and no more pieces than rows (one piece for
  // a tensor without rows). Piece i is a copy on device i. If there is one
  // device, and `tensor` is on it, the piece is `tensor` itself. A second call
  // with the same tensor returns the same pieces. Differentiable, also twice.
  //
  // Throws std::invalid_argument for a tensor without dimensions, and for a
  // tensor that makes another number of pieces than an earlier one of this call
  // (Python drops the additional rows).
  std::vector<at::Tensor> divide(const at::Tensor& tensor);

  // Called after forward: writes into the divided tensors what the replicas
  // have changed in place in their pieces, with its history, so that values and
  // gradients are those of one process, or autograd throws as there.
  void put_back() const;

  size_t devices() const { return devices_.size(); }
  // Returns how many replicas this call needs: the number of pieces, or every
  // device if no tensor was divided.
  size_t parts() const { return parts_.value_or(devices_.size()); }

 private:
  std::vector<at::Device> devices_;
  int64_t dim_;
  std::optional<size_t> parts_;
  std::string first_shape_;  // of the tensor that set parts_, for the error
  struct Divided {
    at::Tensor tensor;
    std::vector<at::Tensor> pieces;
    std::vector<int64_t> versions;  // of the pieces
    std::vector<c10::intrusive_ptr<torch::autograd::Node>> nodes;  // grad_fn()
  };
  std::vector<Divided> divided_;
};

// The device and dimension for joining the parts of a result.
struct GatherTarget {
  at::Device device;
  int64_t dim;
  // Whether scalars of several replicas become a vector.
  bool scalars_to_vector = true;
};

// Defines what DataParallel does with an argument or result of type T. This
// general template is for types without tensors: an argument is copied to all
// replicas, a result is a compiler error. The specialisations below divide and
// concatenate tensors, and treat tuples, pairs, vectors and maps member by
// member. Specialise it for types of your own.
template <typename T>
struct DataParallelValue {
  static constexpr bool divides = false;

  // Returns one T for each part, or for each device if T has nothing to divide.
  static std::vector<T> scatter(const T& value, Scatter& over) {
    return std::vector<T>(over.devices(), value);
  }
  // `parts`: one result of each replica, in their order; not empty.
  static T gather(std::vector<T> parts, const GatherTarget&) {
    static_assert(!std::is_same_v<T, T>,
                  "DataParallel joins tensors, and tuples, pairs, vectors and "
                  "maps of them. Specialise lockstep::DataParallelValue for a "
                  "result of another type.");
    return std::move(parts.front());
  }
};

template <>
struct DataParallelValue<at::Tensor> {
  static constexpr bool divides = true;
  // An undefined tensor goes to all replicas.
  static std::vector<at::Tensor> scatter(const at::Tensor& value,
                                         Scatter& over);
  // Scalars become a vector with one element for each replica if `target.dim`
  // is 0.
  static at::Tensor gather(const std::vector<at::Tensor>& parts,
                           const GatherTarget& target);
};

// AdaptiveLogSoftmaxWithLoss's result; its loss becomes that of all rows.
template <>
struct DataParallelValue<torch::nn::ASMoutput> {
  static constexpr bool divides = true;
  static torch::nn::ASMoutput gather(
      const std::vector<torch::nn::ASMoutput>& parts,
      const GatherTarget& target);
};

template <typename T>
struct DataParallelValue<c10::ArrayRef<T>> {
  static_assert(!std::is_same_v<T, at::Tensor>,
                "DataParallel divides a std::vector of tensors, not a "
                "TensorList, which owns nothing.");
};

}  // namespace lockstep

// The standard containers.
#include "lockstep/parallel/data_parallel/container_values.h"  // IWYU pragma: export

#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep::mpi {

// MPI 3 counts with int. Larger tensors are reduced in parts of this many
// elements, and moved as one element of a larger type. LOCKSTEP_MPI_MAX_COUNT
// makes it smaller, for tests; the same on all ranks.
int64_t max_count();

// How elements are combined. AVG is the sum.
struct Reduction {
  MPI_Datatype type;
  MPI_Op op;
};
// MPI's own types and operations; for float16 and bfloat16, which it lacks,
// ours, in which each pair of elements is combined in float32 and rounded.
// Integers wrap. Bool is reduced as bytes of 0 and 1, which all operations keep
// so but SUM and AVG; those are refused for it before (collective_call.cpp).
// Throws std::invalid_argument for another dtype or operation.
Reduction reduction(at::ScalarType dtype, const c10d::ReduceOp& op);

// `bytes` bytes as `count` elements of `type`, to be moved as they are.
class Bytes {
 public:
  explicit Bytes(size_t bytes);
  Bytes(Bytes&& other) noexcept;
  Bytes& operator=(Bytes&&) = delete;
  ~Bytes();

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }
  // Not freed: an operation that was given up still uses it.
  void leak() { owned_ = false; }

 private:
  int count_;
  MPI_Datatype type_;
  bool owned_ = false;
};

}  // namespace lockstep::mpi

#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep::internal::mpi {

// MPI 3 counts with int. Larger tensors are reduced in parts of this many
// elements, and moved as one element of a larger type. If a call takes a part
// of each rank, the limit holds for the parts together, since OpenMPI 4.1
// multiplies their size by the number of ranks, or by a rank, in an int.
// LOCKSTEP_MPI_MAX_COUNT, for tests, makes the number smaller; it must be the
// same on all ranks.
int64_t max_count();

// How elements are combined. For AVG, op is the sum.
struct Reduction {
  MPI_Datatype type;
  MPI_Op op;
};
// Returns MPI's own type and operation. MPI lacks float16 and bfloat16: for
// these it returns ours, which combines each pair of elements in float32 and
// rounds. Integers wrap. Bool is reduced as bytes of 0 and 1, which stay 0 and
// 1 in all operations but SUM and AVG; collective_call.cpp has refused those
// two for Bool. Throws std::invalid_argument for another dtype or operation.
Reduction reduction(at::ScalarType dtype, const c10d::ReduceOp& op);

// Describes `bytes` bytes as `count` elements of `type`, to be moved as they
// are. If a call takes as much of each of `ranks` ranks, an int can count the
// elements of all together.
class Bytes {
 public:
  explicit Bytes(size_t bytes, int ranks = 1);
  Bytes(Bytes&& other) noexcept;
  Bytes& operator=(Bytes&&) = delete;
  ~Bytes();

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }
  // Keeps the type for ever: an operation that was given up still uses it.
  void leak() { owned_ = false; }

 private:
  int count_;
  MPI_Datatype type_;
  bool owned_ = false;
};

}  // namespace lockstep::internal::mpi

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/shm/protocol/group.h"

// Turns tensors into what the protocol takes.
namespace lockstep::internal::shm {

// One tensor of an operation as one piece of memory: the tensor's own if it is
// contiguous, else a copy. Keeps the tensor alive. A value type.
class Piece {
 public:
  enum class Use { read, write, update };

  // Throws std::invalid_argument whose text begins with `operation` if the
  // tensor is not defined, dense and in host memory.
  Piece(const char* operation, const at::Tensor& tensor, Use use);

  void* data() const { return dense_.data_ptr(); }
  size_t count() const { return static_cast<size_t>(dense_.numel()); }
  Bytes bytes() const { return {dense_.data_ptr(), dense_.nbytes()}; }
  ConstBytes const_bytes() const {
    return {dense_.const_data_ptr(), dense_.nbytes()};
  }
  const at::Tensor& tensor() const { return tensor_; }
  // Returns the same memory as a tensor of one dimension.
  at::Tensor flat() const;
  // Returns the protocol's dtype, which is compared with that of the other
  // ranks.
  DType moved_as() const;

  // Changes to a copy if its memory overlaps that of `other`. With
  // `same_allowed` the two may be exactly the same memory.
  void part_from(const Piece& other, bool same_allowed);

  // Copies what was written to the tensor, if this piece was to be written and
  // is a copy.
  void write_back() const;

 private:
  at::Tensor tensor_;
  at::Tensor dense_;
  Use use_;
};

using Pieces = std::vector<Piece>;

// Returns a Piece for each tensor.
Pieces pieces(const char* operation, const std::vector<at::Tensor>& tensors,
              Piece::Use use);
void write_back(const Pieces& written);
std::vector<Bytes> bytes(const Pieces& of);
std::vector<ConstBytes> const_bytes(const Pieces& of);

// Divides a piece into one part for each rank: counts[r] elements for rank r.
std::vector<Bytes> parts_of(const Piece& whole,
                            const std::vector<size_t>& counts);
template <typename Part>
std::vector<ConstBytes> as_const(const std::vector<Part>& parts) {
  std::vector<ConstBytes> result;
  result.reserve(parts.size());
  for (const auto& part : parts) result.push_back({part.data, part.size});
  return result;
}

// Returns the kernels' dtype, or uint8 (plain bytes) if the kernels do not have
// `dtype`.
DType moved_as(at::ScalarType dtype);

// How the kernels reduce a dtype by an operation. If they cannot,
// require_reduction() throws std::invalid_argument whose text begins with
// `operation`.
struct Reduction {
  DType dtype;
  ReduceOp op;
};
Reduction require_reduction(const char* operation, at::ScalarType dtype,
                            c10d::ReduceOp::RedOpType op);

}  // namespace lockstep::internal::shm

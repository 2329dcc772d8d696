#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/shm/protocol/group.h"

// Tensors as the protocol takes them.
namespace lockstep::shm {

// One tensor of an operation as one piece of memory: the tensor's own where it
// is contiguous, else a copy. Keeps the tensor alive. A value.
class Piece {
 public:
  enum class Use { read, write, update };

  // `operation` begins the messages. Throws std::invalid_argument if the tensor
  // is not defined, dense and of host memory.
  Piece(const char* operation, const at::Tensor& tensor, Use use);

  void* data() const { return dense_.data_ptr(); }
  size_t count() const { return static_cast<size_t>(dense_.numel()); }
  Bytes bytes() const { return {dense_.data_ptr(), dense_.nbytes()}; }
  ConstBytes const_bytes() const {
    return {dense_.const_data_ptr(), dense_.nbytes()};
  }
  const at::Tensor& tensor() const { return tensor_; }
  // The same memory as a tensor of one dimension.
  at::Tensor flat() const;
  // How it is compared with what the other ranks give.
  DType moved_as() const;

  // Takes memory of its own if it shares some with `other` (unless it is the
  // very same, where `same_allowed`).
  void part_from(const Piece& other, bool same_allowed);

  // Once written: the tensor becomes what was written.
  void write_back() const;

 private:
  at::Tensor tensor_;
  at::Tensor dense_;
  Use use_;
};

using Pieces = std::vector<Piece>;

// One tensor a rank, each as Piece.
Pieces pieces(const char* operation, const std::vector<at::Tensor>& tensors,
              Piece::Use use);
void write_back(const Pieces& written);
std::vector<Bytes> bytes(const Pieces& of);
std::vector<ConstBytes> const_bytes(const Pieces& of);

// Parts of a piece, one a rank; `counts` of elements.
std::vector<Bytes> parts_of(const Piece& whole,
                            const std::vector<size_t>& counts);
template <typename Part>
std::vector<ConstBytes> as_const(const std::vector<Part>& parts) {
  std::vector<ConstBytes> result;
  result.reserve(parts.size());
  for (const auto& part : parts) result.push_back({part.data, part.size});
  return result;
}

// The kernels' dtype, or uint8 for what they do not have: its bytes.
DType moved_as(at::ScalarType dtype);

// What reduces `dtype` by `op`. Throws std::invalid_argument that begins with
// `operation` where nothing does.
struct Reduction {
  DType dtype;
  ReduceOp op;
};
Reduction require_reduction(const char* operation, at::ScalarType dtype,
                            c10d::ReduceOp::RedOpType op);

}  // namespace lockstep::shm

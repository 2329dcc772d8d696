#include "lockstep/comm/shm/piece.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <stdexcept>

namespace lockstep::internal::shm {
namespace {

std::optional<DType> kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::float32;
    case at::kDouble:
      return DType::float64;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kChar:
      return DType::int8;
    case at::kByte:
      return DType::uint8;
    case at::kInt:
      return DType::int32;
    case at::kLong:
      return DType::int64;
    case at::kBool:
      return DType::boolean;
    default:
      return std::nullopt;
  }
}

std::optional<ReduceOp> kernel_op(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::band;
    case c10d::ReduceOp::BOR:
      return ReduceOp::bor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::bxor;
    default:
      return std::nullopt;
  }
}

void require_in_host_memory(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    throw std::invalid_argument(
        c10::str(operation, ": a tensor is undefined; give one with memory"));
  }
  if (tensor.device().is_cpu() && tensor.layout() == at::kStrided) return;
  throw std::invalid_argument(c10::str(operation, ": a tensor is ",
                                       tensor.layout(), " on ", tensor.device(),
                                       "; \"shm\" takes dense tensors on cpu"));
}

// Returns contiguous memory to read from or to write to: the tensor itself if
// it is contiguous already.
at::Tensor dense_form(const at::Tensor& tensor, Piece::Use use) {
  if (tensor._is_zerotensor()) {  // has no memory; nothing is written to it
    return at::zeros(tensor.sizes(), tensor.options().requires_grad(false));
  }
  const bool plain =
      tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  if (plain) return tensor;
  if (use == Piece::Use::write) {
    return at::empty(tensor.sizes(), tensor.options().requires_grad(false));
  }
  const c10::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

}  // namespace

Piece::Piece(const char* operation, const at::Tensor& tensor, Use use)
    : tensor_(tensor), use_(use) {
  require_in_host_memory(operation, tensor);
  if (use != Use::read && tensor._is_zerotensor()) {
    throw std::invalid_argument(
        c10::str(operation,
                 ": a tensor to write to is zeros without memory (a "
                 "ZeroTensor); give tensor.clone()"));
  }
  dense_ = dense_form(tensor, use);
}

at::Tensor Piece::flat() const {
  return dense_.as_strided({dense_.numel()}, {1});
}

DType Piece::moved_as() const { return shm::moved_as(dense_.scalar_type()); }

void Piece::part_from(const Piece& other, bool same_allowed) {
  const auto* own = static_cast<const std::byte*>(dense_.const_data_ptr());
  const auto* theirs =
      static_cast<const std::byte*>(other.dense_.const_data_ptr());
  const bool apart =
      own + dense_.nbytes() <= theirs || theirs + other.dense_.nbytes() <= own;
  if (apart || (same_allowed && own == theirs &&
                dense_.nbytes() == other.dense_.nbytes())) {
    return;
  }
  const c10::NoGradGuard no_grad;
  dense_ = dense_.clone();
}

void Piece::write_back() const {
  if (use_ == Use::read || dense_.is_same(tensor_)) return;
  const c10::NoGradGuard no_grad;
  tensor_.copy_(dense_);
}

Pieces pieces(const char* operation, const std::vector<at::Tensor>& tensors,
              Piece::Use use) {
  Pieces all;
  all.reserve(tensors.size());
  for (const auto& tensor : tensors) all.emplace_back(operation, tensor, use);
  return all;
}

void write_back(const Pieces& written) {
  for (const auto& piece : written) piece.write_back();
}

std::vector<Bytes> bytes(const Pieces& of) {
  std::vector<Bytes> all;
  all.reserve(of.size());
  for (const auto& piece : of) all.push_back(piece.bytes());
  return all;
}

std::vector<ConstBytes> const_bytes(const Pieces& of) {
  std::vector<ConstBytes> all;
  all.reserve(of.size());
  for (const auto& piece : of) all.push_back(piece.const_bytes());
  return all;
}

std::vector<Bytes> parts_of(const Piece& whole,
                            const std::vector<size_t>& counts) {
  std::vector<Bytes> parts;
  parts.reserve(counts.size());
  auto* at = static_cast<std::byte*>(whole.data());
  for (const auto count : counts) {
    const size_t size = count * whole.tensor().itemsize();
    parts.push_back({at, size});
    at += size;
  }
  return parts;
}

DType moved_as(at::ScalarType dtype) {
  return kernel_dtype(dtype).value_or(DType::uint8);
}

Reduction require_reduction(const char* operation, at::ScalarType dtype,
                            c10d::ReduceOp::RedOpType op) {
  const auto of = kernel_dtype(dtype);
  const auto by = kernel_op(op);
  if (!of) {
    throw std::invalid_argument(c10::str(
        operation, ": a tensor of ", dtype,
        " cannot be reduced; allowed are Float, Double, Half, BFloat16, Char, "
        "Byte, Int, Long and Bool: convert it, or give its view_as_real()"));
  }
  if (!by) {
    throw std::invalid_argument(c10::str(
        operation, ": reduce operation ", static_cast<int>(op),
        " is not known; allowed are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and "
        "BXOR"));
  }
  if (!kernels::is_reducible(*of, *by)) {
    throw std::invalid_argument(
        c10::str(operation, ": ", kernels::name_of(*by), " of ", dtype,
                 " is not supported; allowed are SUM of numbers, AVG of "
                 "floating point, PRODUCT, MIN and MAX of all, and BAND, BOR "
                 "and BXOR of integers and Bool"));
  }
  return {.dtype = *of, .op = *by};
}

}  // namespace lockstep::internal::shm

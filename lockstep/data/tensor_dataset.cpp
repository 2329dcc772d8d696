#include "lockstep/data/tensor_dataset.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "lockstep/data/held_dataset.h"

namespace lockstep::internal {
namespace {

// Batches from here on are worth several threads.
constexpr size_t kLargeBytes = 1 << 20;

// An ordinary tensor on the CPU has exactly these keys. Lazily negated, sparse,
// quantised, wrapped and other special tensors have others.
bool is_ordinary(const at::Tensor& rows) {
  static const c10::DispatchKeySet keys =
      at::detail::empty_cpu({0}, at::kFloat).key_set();
  return rows.key_set() == keys && rows.is_contiguous() &&
         !(rows.requires_grad() && c10::GradMode::is_enabled());
}

}  // namespace

at::Tensor gather_rows(const at::Tensor& rows, c10::ArrayRef<size_t> indices) {
  const size_t count = rows.size(0);
  const bool ordinary = is_ordinary(rows);
  const size_t row_bytes = ordinary && count > 0 ? rows.nbytes() / count : 0;
  const bool is_large = indices.size() * row_bytes >= kLargeBytes;
  if (!ordinary || (is_large && at::get_num_threads() > 1)) {
    static_assert(sizeof(size_t) == sizeof(int64_t));
    // The indices are read in place: index_select wants int64, and size_t
    // differs from it only in values that no dataset reaches (they would become
    // negative, and index_select refuses them).
    const at::Tensor numbers = at::from_blob(
        const_cast<size_t*>(indices.data()),
        {static_cast<int64_t>(indices.size())}, at::TensorOptions(at::kLong));
    // This is a no-op on the CPU. The copy to a GPU from pageable memory is
    // synchronous, so the caller's indices need not outlive this call there
    // either.
    return rows.index_select(0, numbers.to(rows.device()));
  }

  c10::SmallVector<int64_t, 5> shape(rows.sizes().begin(), rows.sizes().end());
  shape[0] = static_cast<int64_t>(indices.size());
  at::Tensor batch = at::detail::empty_cpu(shape, rows.scalar_type());
  const auto* from = static_cast<const char*>(rows.const_data_ptr());
  auto* to = static_cast<char*>(batch.mutable_data_ptr());
  for (size_t begin = 0; begin < indices.size();) {
    check_index(indices[begin], count, "TensorDataset");
    size_t end = begin + 1;
    while (end < indices.size() && indices[end] == indices[end - 1] + 1 &&
           indices[end] < count) {
      ++end;
    }
    if (row_bytes > 0) {
      std::memcpy(to + begin * row_bytes, from + indices[begin] * row_bytes,
                  (end - begin) * row_bytes);
    }
    begin = end;
  }
  return batch;
}

}  // namespace lockstep::internal

namespace lockstep {

TensorDataset::TensorDataset(at::Tensor data, at::Tensor target)
    : data_(std::move(data)), target_(std::move(target)) {
  auto require_rows = [](const at::Tensor& tensor, const char* name) {
    if (!tensor.defined() || tensor.dim() == 0) {
      throw std::invalid_argument(
          std::string("TensorDataset: ") + name +
          (tensor.defined() ? " is a scalar" : " is undefined") +
          "; give a tensor whose first dimension counts the samples");
    }
  };
  require_rows(data_, "data");
  require_rows(target_, "target");
  if (data_.size(0) != target_.size(0)) {
    throw std::invalid_argument(
        "TensorDataset: data has " + std::to_string(data_.size(0)) +
        " rows and target " + std::to_string(target_.size(0)) +
        "; give one target for each sample");
  }
}

torch::data::Example<> TensorDataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  return {internal::gather_rows(data_, indices),
          internal::gather_rows(target_, indices)};
}

torch::data::Example<> TensorDataset::get(size_t index) const {
  internal::check_index(index, static_cast<size_t>(data_.size(0)),
                        "TensorDataset");
  const auto row = static_cast<int64_t>(index);
  return {data_.select(0, row).clone(), target_.select(0, row).clone()};
}

}  // namespace lockstep

#include "lockstep/comm/shm/arguments.h"

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace lockstep::internal::shm {
namespace {

template <typename... Parts>
std::invalid_argument mistake(const char* operation, const Parts&... parts) {
  return std::invalid_argument(c10::str(operation, ": ", parts...));
}

}  // namespace

const at::Tensor& single(const char* operation,
                         const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1 || !tensors[0].defined()) {
    throw mistake(operation, "the list holds ", tensors.size(),
                  " tensors; give one that is defined");
  }
  return tensors[0];
}

const std::vector<at::Tensor>& one_a_rank(
    const char* operation, const std::vector<std::vector<at::Tensor>>& lists,
    int size) {
  if (lists.size() != 1) {
    throw mistake(operation, lists.size(), " lists were given; give one");
  }
  if (static_cast<int>(lists[0].size()) != size) {
    throw mistake(operation, "a list holds ", lists[0].size(),
                  " tensors; give one for each rank (", size, ")");
  }
  return lists[0];
}

void require_same_length(const char* operation, size_t outputs, size_t inputs) {
  if (outputs != inputs) {
    throw mistake(operation, outputs, " outputs and ", inputs,
                  " inputs; give equally many");
  }
}

void require_same_dtype(const char* operation, const at::Tensor& tensor,
                        const at::Tensor& like) {
  if (tensor.scalar_type() != like.scalar_type()) {
    throw mistake(operation, "tensors are ", like.scalar_type(), " and ",
                  tensor.scalar_type(), "; give tensors of one dtype");
  }
}

void require_elements(const char* operation, const at::Tensor& tensor,
                      int64_t count) {
  if (tensor.numel() != count) {
    throw mistake(operation, "a tensor has ", tensor.numel(),
                  " elements; the other tensors ask for ", count);
  }
}

int checked_rank(const char* operation, int64_t rank, int size) {
  if (rank < 0 || rank >= size) {
    throw mistake(operation, "rank ", rank, " is not in this group of ", size,
                  " ranks; give 0 to ", size - 1);
  }
  return static_cast<int>(rank);
}

std::vector<size_t> element_counts(const char* operation,
                                   const at::Tensor& tensor,
                                   const std::vector<int64_t>& rows, int size) {
  if (!tensor.defined() || tensor.dim() == 0) {
    throw mistake(operation,
                  "a tensor has no rows; give one dimension or more");
  }
  const int64_t all = tensor.size(0);
  std::vector<int64_t> of = rows;
  if (of.empty() && all % size == 0) of.assign(size, all / size);
  if (static_cast<int>(of.size()) != size ||
      std::ranges::any_of(of, [](int64_t count) { return count < 0; }) ||
      std::accumulate(of.begin(), of.end(), int64_t{0}) != all) {
    throw mistake(
        operation, "splits ", rows, " of ", all,
        " rows; give one for each rank (", size,
        ") that add up to the rows, or none if the rows can be divided "
        "equally");
  }
  const int64_t row = all > 0 ? tensor.numel() / all : 0;
  std::vector<size_t> counts;
  for (const auto count : of) {
    counts.push_back(static_cast<size_t>(count * row));
  }
  return counts;
}

}  // namespace lockstep::internal::shm

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// What c10d's lists of tensors must be. `operation` begins the messages of the
// std::invalid_argument that all of these throw.
namespace lockstep::shm {

// A list of one.
const at::Tensor& single(const char* operation,
                         const std::vector<at::Tensor>& tensors);

// A list of one list of `size` tensors: one a rank.
const std::vector<at::Tensor>& one_a_rank(
    const char* operation, const std::vector<std::vector<at::Tensor>>& lists,
    int size);
void require_one_a_rank(const char* operation,
                        const std::vector<at::Tensor>& tensors, int size);

void require_same_length(const char* operation, size_t outputs, size_t inputs);
void require_same_dtype(const char* operation, const at::Tensor& tensor,
                        const at::Tensor& like);
void require_elements(const char* operation, const at::Tensor& tensor,
                      int64_t count);

// `rank` of a group of `size`.
int checked_rank(const char* operation, int64_t rank, int size);

// Elements that go to, or come from, each rank: `rows` of `tensor`, or equally
// many where that is empty.
std::vector<size_t> element_counts(const char* operation,
                                   const at::Tensor& tensor,
                                   const std::vector<int64_t>& rows, int size);

}  // namespace lockstep::shm

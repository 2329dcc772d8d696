#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Checks and unpacks the arguments of c10d's operations. If an argument is
// wrong, each function throws std::invalid_argument whose text begins with
// `operation`.
namespace lockstep::internal::shm {

// Returns the only tensor of the list, which must be defined.
const at::Tensor& single(const char* operation,
                         const std::vector<at::Tensor>& tensors);

// Returns the only list of `lists`, which must hold `size` tensors: one for
// each rank.
const std::vector<at::Tensor>& one_a_rank(
    const char* operation, const std::vector<std::vector<at::Tensor>>& lists,
    int size);

void require_same_length(const char* operation, size_t outputs, size_t inputs);
void require_same_dtype(const char* operation, const at::Tensor& tensor,
                        const at::Tensor& like);
void require_elements(const char* operation, const at::Tensor& tensor,
                      int64_t count);

// Returns `rank`, which must be one of a group of `size` ranks.
int checked_rank(const char* operation, int64_t rank, int size);

// Returns how many elements go to, or come from, each rank: those of rows[r]
// rows of `tensor` for rank r, or equally many for each rank if `rows` is
// empty.
std::vector<size_t> element_counts(const char* operation,
                                   const at::Tensor& tensor,
                                   const std::vector<int64_t>& rows, int size);

}  // namespace lockstep::internal::shm

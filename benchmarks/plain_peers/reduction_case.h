#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "benchmarks/plain_peers/reducer.h"

namespace lockstep::internal::bench {

// One all_reduce with its memory, without LibTorch. "Collective": as in
// reducer.h.
class ReductionCase {
 public:
  // Collective. Throws std::invalid_argument for what the reducer cannot do.
  ReductionCase(Reducer& reducer, size_t count, kernels::DType dtype,
                kernels::ReduceOp op);
  ReductionCase(const ReductionCase&) = delete;
  ReductionCase& operator=(const ReductionCase&) = delete;
  ~ReductionCase();

  // Writes small whole numbers that belong to this rank, which every dtype
  // reduces exactly in any order.
  void fill();
  void run() { reducer_.all_reduce(data_, count_, dtype_, op_); }
  // Returns the number of elements that differ from what fill() on all ranks
  // and one run() give, by the plain loop of the kernels. `first` then
  // describes the first of them.
  int64_t count_wrong(std::string& first) const;
  // Writes zeros, which do not overflow, however often run() is repeated.
  void clear();

 private:
  Reducer& reducer_;
  size_t count_;
  kernels::DType dtype_;
  kernels::ReduceOp op_;
  std::byte* data_;
};

}  // namespace lockstep::internal::bench

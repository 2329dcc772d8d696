#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/kernels/dtype.h"

namespace lockstep::bench {

// What a side without LibTorch all-reduces with: one rank's view of a world
// that started its ranks by itself. One thread. Every function that all ranks
// must call says so; those that fail throw a std::exception, after which the
// program ends.
class Reducer {
 public:
  virtual ~Reducer() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // What stands in the JSON's "sides".
  virtual nlohmann::json facts() const = 0;
  // Returns why this side cannot reduce that, or nothing.
  virtual std::string refusal(size_t count, kernels::DType dtype,
                              kernels::ReduceOp op) const = 0;

  // This rank's part of a reduction, until release(); all ranks, one at a time.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data) = 0;
  // All ranks.
  virtual void all_reduce(void* data, size_t count, kernels::DType dtype,
                          kernels::ReduceOp op) = 0;

  // The greatest of all ranks' numbers, when all have come; all ranks.
  virtual int64_t greatest(int64_t number) = 0;
  // Rank 0's text; all ranks. The others may wait for hours, and leave the
  // cores to the sides that are at work.
  virtual std::string from_first(const std::string& text) = 0;
  // On rank 0 all ranks' texts, by rank; all ranks.
  virtual std::vector<std::string> to_first(const std::string& text) = 0;
};

}  // namespace lockstep::bench

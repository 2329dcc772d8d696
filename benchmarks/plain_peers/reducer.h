#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/kernels/dtype.h"

namespace lockstep::internal::bench {

// The all_reduce of a side without LibTorch: one rank's view of a world that
// started its ranks by itself. For one thread. "Collective" means that all
// ranks must call the function. Functions that fail throw a std::exception;
// after that the program ends.
class Reducer {
 public:
  virtual ~Reducer() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Returns what the JSON's "sides" say of this side.
  virtual nlohmann::json facts() const = 0;
  // Returns why this side cannot do such a reduction; empty if it can.
  virtual std::string refusal(size_t count, kernels::DType dtype,
                              kernels::ReduceOp op) const = 0;

  // Returns the memory for this rank's part of a reduction, valid until
  // release(). Collective; one at a time.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data) = 0;
  // Reduces over all ranks. Collective.
  virtual void all_reduce(void* data, size_t count, kernels::DType dtype,
                          kernels::ReduceOp op) = 0;

  // Returns the greatest of all ranks' numbers, once all ranks have come.
  // Collective.
  virtual int64_t greatest(int64_t number) = 0;
  // Returns rank 0's text. Collective. The other ranks may wait for hours, and
  // must leave the cores to the sides that are at work.
  virtual std::string from_first(const std::string& text) = 0;
  // Returns, on rank 0, all ranks' texts, by rank. Collective.
  virtual std::vector<std::string> to_first(const std::string& text) = 0;
};

}  // namespace lockstep::internal::bench

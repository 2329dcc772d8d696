#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/state/box.h"

namespace lockstep::internal {

// The elements of one parameter that each rank owns, in memory order: rank r
// owns the range ranges[r], which may be empty. The ranges ascend, and together
// hold every element once.
using Ranges = std::vector<Range>;

// Decides which rank steps which elements. It follows Rajbhandari et al.,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC
// 2020), section 5.1. The result depends only on the arguments and their order,
// so ranks agree without communication; it does not depend on how gradients are
// bucketed.
class Partition {
 public:
  // Parameters are cut at multiples of this number, so that a vectorised kernel
  // does with a piece exactly what it does with the whole, and no two ranks
  // write to one cache line.
  static constexpr int64_t kGrain = 64;
  // Parameters with fewer elements per rank are not cut.
  static constexpr int64_t kSmall = 4096;

  // `cut`: whether parameters may be divided; they may if the optimizer treats
  // each element by itself.
  Partition(int world_size, bool cut);

  // Returns the ranges for each of `parameters`. If parameters are cut: as many
  // contiguous pieces as there are ranks, of equal size except the last, which
  // may have up to kGrain elements per rank more. Parameters that are small or
  // not dense, or all if they are not cut, go as a whole to the rank with the
  // fewest bytes so far, large parameters first.
  std::vector<Ranges> add(const std::vector<at::Tensor>& parameters);

 private:
  Ranges whole(int64_t numel, int64_t bytes);

  bool cut_;
  std::vector<int64_t> bytes_;  // by rank
};

}  // namespace lockstep::internal

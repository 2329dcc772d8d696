#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"

namespace lockstep {

// One parameter's elements in the order in which they lie in memory, by rank:
// those of rank r are [begin, end) of ranges[r], none where that is empty.
// Ascending; together every element once.
using Ranges = std::vector<ElementRange>;

// Which rank steps which elements. After Rajbhandari et al., "ZeRO: Memory
// Optimizations Toward Training Trillion Parameter Models" (SC 2020), section
// 5.1. A pure function of what it is given, in order, so that ranks agree
// without a word; it does not depend on how gradients are bucketed.
class Partition {
 public:
  // Where parameters are cut: multiples of this, so that a kernel that works in
  // vectors does with a piece exactly what it does with the whole, and no two
  // ranks write to one cache line.
  static constexpr int64_t kGrain = 64;
  // Parameters of fewer elements a rank stay whole.
  static constexpr int64_t kSmall = 4096;

  // `cut`: whether parameters may be divided, as they may where the optimizer
  // treats each element by itself.
  Partition(int world_size, bool cut);

  // Of each of `parameters`. Cut: in as many contiguous pieces as there are
  // ranks, equal but for the last, which has up to kGrain elements a rank more.
  // Not cut, small, or not dense: whole, to the rank with the fewest bytes so
  // far, large parameters first.
  std::vector<Ranges> add(const std::vector<at::Tensor>& parameters);

 private:
  Ranges whole(int64_t numel, int64_t bytes);

  bool cut_;
  std::vector<int64_t> bytes_;  // by rank
};

}  // namespace lockstep

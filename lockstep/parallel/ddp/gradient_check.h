#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep {

// Looks for NaN and infinity in what each rank contributes to a reduction, and
// lets all ranks fail alike. Not for several threads.
class GradientCheck {
 public:
  // `parameters`: what slots' numbers mean; must outlive this.
  GradientCheck(const std::vector<NamedParameter>& parameters,
                ProcessGroupPtr group);

  // This rank's contribution, before it is published.
  void look(const Bucket& bucket);
  void look(size_t parameter, const at::Tensor& gradient);
  // What was seen in a backward that was given up.
  void forget() { found_ = -1; }
  // Collective, at the end of a backward, before a gradient is used. If any
  // rank saw something throws on all ranks std::runtime_error that names rank,
  // parameter and `step`; of several the lowest rank's first.
  void agree(int64_t step);

 private:
  const std::vector<NamedParameter>& parameters_;
  ProcessGroupPtr group_;
  int64_t found_ = -1;  // a parameter
  bool is_nan_ = false;
};

}  // namespace lockstep

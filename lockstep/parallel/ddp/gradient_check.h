#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep::internal {

// Looks for NaN and infinity in what each rank contributes to a reduction, and
// makes all ranks fail alike. One thread at a time.
class GradientCheck {
 public:
  // `parameters`: those to which the slots' indices refer; must outlive this.
  GradientCheck(const std::vector<NamedParameter>& parameters,
                ProcessGroupPtr group);

  // Checks this rank's contribution, before it is published.
  void look(const GradientBucket& bucket);
  void look(size_t parameter, const at::Tensor& gradient);
  // Forgets what was seen in a backward that was given up.
  void forget() { found_ = -1; }
  // Collective, at the end of a backward, before a gradient is used. If any
  // rank saw NaN or infinity, throws std::runtime_error on all ranks, with
  // rank, parameter and `step`; if several did, it reports the lowest rank's
  // first.
  void agree(int64_t step);

 private:
  const std::vector<NamedParameter>& parameters_;
  ProcessGroupPtr group_;
  int64_t found_ = -1;  // index of a parameter; -1 if there is none
  bool is_nan_ = false;
};

}  // namespace lockstep::internal

#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

// One copy of the parameters for all ranks of one host, in memory common to
// them, and the order in which they read and write it.
//
// A step is: begin_step(), writing, end_step(), wait(). Threads: one at a time.
class SharedParameters {
 public:
  // Collective. Moves `parameters`, which are the same on all ranks, into
  // common memory, where they have rank 0's values; the memory lives as long as
  // one of them. Throws std::invalid_argument, on all ranks, if the group has
  // no such memory or a parameter cannot lie there.
  SharedParameters(const std::vector<at::Tensor>& parameters,
                   const ProcessGroupPtr& group);

  // Every rank has come to its step, so that none computes with the parameters.
  void begin_step();
  // What this rank wrote may be read once the others have waited. Does not
  // block.
  void end_step();
  // Until every rank's step has ended. Returns at once without one under way.
  void wait();

 private:
  ProcessGroupPtr group_;
  std::unique_ptr<SplitBarrier> barrier_;  // none: this rank is alone
};

}  // namespace lockstep

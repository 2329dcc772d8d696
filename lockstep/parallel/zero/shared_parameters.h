#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// One copy of the parameters for all ranks of one host, in memory that they
// share, and the synchronisation of reading and writing it.
//
// A step calls begin_step(), writes, then calls end_step() and wait(). Threads:
// one at a time.
class SharedParameters {
 public:
  // Collective. Moves `parameters`, which must be the same on all ranks, into
  // shared memory, where they get rank 0's values; the memory lives as long as
  // any of them. Throws std::invalid_argument, on all ranks, if the group has
  // no such memory or a parameter cannot be moved there.
  SharedParameters(const std::vector<at::Tensor>& parameters,
                   const ProcessGroupPtr& group);

  // Waits until every rank has come to its step, so that no rank computes with
  // the parameters any more.
  void begin_step();
  // Tells the other ranks that this rank has finished writing; they may read it
  // after their wait(). Does not block.
  void end_step();
  // Waits until every rank's step has ended. Returns at once if no step is
  // running.
  void wait();

 private:
  ProcessGroupPtr group_;
  std::unique_ptr<SplitBarrier> barrier_;  // null if this rank is alone
};

}  // namespace lockstep::internal

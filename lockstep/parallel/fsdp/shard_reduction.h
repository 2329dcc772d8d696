#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/fsdp/flat_parameters.h"

namespace lockstep::internal {

// Averages the gradients of units over the ranks, one FlatParameters after
// another while backward goes on, and adds each rank's slice of the result to
// the shards' .grad. The full gradients of few units exist at a time.
//
// All ranks start the same reductions in the same order. Threads: one at a
// time. Blocking: start() waits until memory of an earlier reduction is free,
// that is, until every rank has come to that reduction; finish() waits for all.
class ShardReduction {
 public:
  // Collective. Reduces in memory that the ranks share if `group` has it, and
  // by reduce_scatter_tensor() otherwise. `flats` are all that will ever be
  // reduced. `replicate_group` may be null; the result is averaged over it,
  // too. `pool` must outlive this object. `gathers`: whether the ranks gather
  // parameters, so that the caller compares them anyway.
  static std::unique_ptr<ShardReduction> make(
      const std::vector<FlatParameters*>& flats, const ProcessGroupPtr& group,
      const ProcessGroupPtr& replicate_group, BufferPool& pool, bool gathers);
  virtual ~ShardReduction() = default;

  // Called when a backward begins whose gradients will be reduced.
  virtual void begin_backward() {}
  // Takes the gradients of `flat` and starts to reduce them. `number` tells
  // backward passes apart.
  virtual void start(FlatParameters& flat, int64_t number) = 0;
  // Whether ranks that reduce gradients of different `flats` or numbers at the
  // same time throw c10::DistBackendError, as in shared memory. Otherwise .grad
  // does not change before finish(), and the caller compares the ranks.
  virtual bool compares_order() const { return false; }
  // Does what can be done without blocking.
  virtual void advance() {}
  // Ends all reductions: .grad is final.
  void finish();
  // Gives up the reductions that are under way; their gradients are lost. In
  // shared memory, peers that wait for this rank throw at once. Only destroy
  // this object afterwards.
  virtual void abandon() noexcept;

 protected:
  explicit ShardReduction(ProcessGroupPtr replicate_group)
      : replicate_group_(std::move(replicate_group)) {}
  // Ends those that were started, by calls of deliver().
  virtual void finish_started() = 0;
  // `reduced`: this rank's slice, averaged over the group, in memory that
  // belongs to the result.
  void deliver(FlatParameters& flat, const at::Tensor& reduced);

 private:
  struct Delivery {
    FlatParameters* flat;
    at::Tensor reduced;
    WorkPtr work;  // null if there are no replicas
  };
  const ProcessGroupPtr replicate_group_;
  std::vector<Delivery> deliveries_;
};

}  // namespace lockstep::internal

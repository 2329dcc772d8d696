#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/comm/backend_traits.h"

namespace lockstep::internal::fake {

// One process that takes itself for a rank of a group of any size. Nothing is
// sent, no operation waits, and every work has ended when it is returned. For
// dry runs: groups, shapes, memory and bytes of a program on 1,024 ranks can be
// seen on one.
//
// The numbers are those of a group whose ranks all have the same tensors,
// without the sums, as in Python's backend of the same name (which leaves what
// another rank would send as it is, where this one gives zeros):
//
//   broadcast, all_reduce, reduce   leave the tensor as it is
//   all_gather, gather              each part of the output is this rank's
//                                   input
//   reduce_scatter, scatter         the output is this rank's part of the
//                                   input; zeros where scatter gets none
//   all_to_all                      the output is the input; zeros if they have
//                                   not the same number of elements
//   receiving                       gives zeros, from the lowest other rank if
//                                   any may send
//
// c10d's own FakeProcessGroup.hpp cannot be included: it needs Python's
// headers. Its works also never say that they have completed.
//
// Threads: any. Blocking: nothing.
class Backend final : public c10d::Backend, public BackendTraits {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  using c10d::Backend::Backend;

  bool takes_lists_at_once() const override { return true; }

  const std::string getBackendName() const override { return "fake"; }

  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  // `outputs` by rank.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
};

}  // namespace lockstep::internal::fake

#include "lockstep/comm/fake/create.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/backend_traits.h"

namespace lockstep::internal::fake {
namespace {

using c10d::OpType;

class EndedWork final : public c10d::Work {
 public:
  EndedWork(int rank, OpType type, std::vector<at::Tensor> results = {},
            int source = -1)
      : Work(rank, type), results_(std::move(results)), source_(source) {
    finish();
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  void abort() override {}
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  const std::vector<at::Tensor> results_;
  const int source_;
};

c10::intrusive_ptr<c10d::Work> ended(int rank, OpType type,
                                     std::vector<at::Tensor> results = {}) {
  return c10::make_intrusive<EndedWork>(rank, type, std::move(results));
}

// Copies the values that exist; the rest, which another rank would send, is
// zero.
void give(const at::Tensor& output, const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  if (output.numel() == input.numel()) {
    output.copy_(input.reshape(output.sizes()));
  } else {
    output.zero_();
  }
}

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

Backend::WorkPtr Backend::allreduce(Tensors& tensors,
                                    const c10d::AllreduceOptions& /*options*/) {
  return ended(getRank(), OpType::ALLREDUCE, tensors);
}

Backend::WorkPtr Backend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& /*options*/) {
  return ended(getRank(), OpType::ALLREDUCE_COALESCED, tensors);
}

Backend::WorkPtr Backend::reduce(Tensors& tensors,
                                 const c10d::ReduceOptions& /*options*/) {
  return ended(getRank(), OpType::REDUCE, tensors);
}

Backend::WorkPtr Backend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs,
    const c10d::ReduceScatterOptions& /*options*/) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    give(outputs[i], inputs[i].at(getRank()));
  }
  return ended(getRank(), OpType::REDUCE_SCATTER, outputs);
}

Backend::WorkPtr Backend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& /*options*/) {
  const auto part = output.numel();
  give(output, input.reshape({-1}).narrow(0, getRank() * part, part));
  return ended(getRank(), OpType::_REDUCE_SCATTER_BASE, {output});
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors,
                                    const c10d::BroadcastOptions& /*options*/) {
  return ended(getRank(), OpType::BROADCAST, tensors);
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& /*options*/) {
  for (const auto& output : outputs.at(0)) give(output, inputs.at(0));
  return ended(getRank(), OpType::ALLGATHER, outputs[0]);
}

Backend::WorkPtr Backend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& /*options*/) {
  const at::NoGradGuard no_grad;
  output.view({getSize(), input.numel()}).copy_(input.reshape({1, -1}));
  return ended(getRank(), OpType::_ALLGATHER_BASE, {output});
}

Backend::WorkPtr Backend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& /*options*/) {
  Tensors results;
  for (const auto& list : outputs) {
    for (size_t i = 0; i < list.size(); ++i) {
      give(list[i], inputs.at(i));
      results.push_back(list[i]);
    }
  }
  return ended(getRank(), OpType::COALESCED, std::move(results));
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& /*options*/) {
  if (outputs.empty()) return ended(getRank(), OpType::GATHER);
  for (const auto& output : outputs[0]) give(output, inputs.at(0));
  return ended(getRank(), OpType::GATHER, outputs[0]);
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                  const c10d::ScatterOptions& /*options*/) {
  if (inputs.empty()) {
    const at::NoGradGuard no_grad;
    outputs.at(0).zero_();
  } else {
    give(outputs.at(0), inputs[0].at(getRank()));
  }
  return ended(getRank(), OpType::SCATTER, outputs);
}

Backend::WorkPtr Backend::alltoall_base(
    at::Tensor& output, at::Tensor& input,
    std::vector<int64_t>& /*output_splits*/,
    std::vector<int64_t>& /*input_splits*/,
    const c10d::AllToAllOptions& /*options*/) {
  give(output, input);
  return ended(getRank(), OpType::ALLTOALL_BASE, {output});
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& /*options*/) {
  return ended(getRank(), OpType::BARRIER);
}

Backend::WorkPtr Backend::send(Tensors& tensors, int /*to*/, int /*tag*/) {
  return ended(getRank(), OpType::SEND, tensors);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int /*tag*/) {
  const at::NoGradGuard no_grad;
  for (const auto& tensor : tensors) tensor.zero_();
  return c10::make_intrusive<EndedWork>(getRank(), OpType::RECV, tensors, from);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  const int lowest_other = getRank() == 0 && getSize() > 1 ? 1 : 0;
  return recv(tensors, lowest_other, tag);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  return c10::make_intrusive<Backend>(request.rank, request.size);
}

}  // namespace lockstep::internal::fake

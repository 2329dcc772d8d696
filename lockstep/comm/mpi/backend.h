#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/mpi/pending.h"
#include "lockstep/comm/work_queue.h"

namespace lockstep::internal::mpi {

// A c10d::Backend over one communicator. Collectives run one after the other
// (WorkQueue), messages beside them. All tensors must be contiguous and on the
// CPU (std::invalid_argument otherwise); shapes are not checked beyond that.
//
// A collective that does not end in time, or fails, or whose turn does not come
// in time, breaks the group, because
// MPI cannot take it back. Its memory is kept for ever, and later calls fail at
// once with the first reason.
//
// Threads: as for WorkQueue. The destructor waits for pending operations.
class Backend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // `timeout` is for operations that are given none.
  Backend(std::shared_ptr<Communicator> communicator,
          std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return "mpi"; }

  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_split_sizes,
                        std::vector<int64_t>& input_split_sizes,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Ends this rank's waits with an error. Peers learn nothing of it: they wait
  // until their deadlines, or until mpirun ends them because this process has
  // left.
  void abort() override;

 private:
  // All collectives go through issue(), which gives each its time and its turn,
  // and perform(), which breaks the group if one fails.
  template <typename CallOptions, typename Body>
  WorkPtr issue(c10d::OpType type, const CallOptions& opts, Tensors results,
                Body body);
  template <typename Body>
  void perform(const Deadline& deadline, const Body& body);
  void break_off(const std::string& reason);
  void break_by(const std::exception& error);
  void require_whole();

  const LivingGroup living_;
  std::shared_ptr<Communicator> communicator_;
  const std::chrono::milliseconds timeout_;
  std::mutex reason_mutex_;
  std::string reason_;  // why the group is broken; empty while it is not
  WorkQueue queue_{"lockstep-mpi"};  // destroyed first
};

}  // namespace lockstep::internal::mpi

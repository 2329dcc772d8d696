#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/direct_reduce.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/peer_notices.h"
#include "lockstep/comm/shm/protocol/group.h"
#include "lockstep/comm/shm/protocol/standstill.h"
#include "lockstep/comm/shm/protocol_call.h"
#include "lockstep/comm/work_queue.h"

namespace lockstep::shm {

class Messages;
class SharedTensors;

// The protocol of a Group as a c10d::Backend.
//
// Collectives: one after the other, through a WorkQueue: with asyncOp false in
// the caller, whose errors are thrown at once; else on one thread. Messages: in
// any order among these; those that do not end at once go on without a waiter,
// on one thread that the first of them starts.
//
// Tensors of host memory, dense (allreduce: sparse too), of any dtype where
// data only moves; those that are not contiguous go through a copy. What may
// overlap: an input and the output of the same rank, if they are the same.
//
// Errors: std::invalid_argument for a mistake of this rank,
// c10::DistBackendError for all else (protocol/group.h says what they name).
//
// Threads: any, the order of collectives being the caller's affair. The
// destructor waits for collectives that are pending and drops messages that
// are; not while another thread uses the backend. Tensors from allocateTensor()
// may outlive it.
class Backend final : public c10d::Backend,
                      public DirectReduce,
                      public HostSharing,
                      public PeerNotices {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // `timeout`: of what names none.
  Backend(Membership membership, milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "shm"; }
  // Collectives that were begun on this rank.
  uint64_t getSequenceNumberForGroup() override {
    return begun_.load(std::memory_order_relaxed);
  }
  void setSequenceNumberForGroup() override {}  // 0 on all ranks

  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors,
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
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override;

  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;

  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  // Names whoever does not come, as every collective here.
  void monitoredBarrier(const c10d::BarrierOptions& options,
                        bool wait_all_ranks) override;

  // One tensor each. Works without futures.
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // What is pending, and all that comes, fails; the peers see this rank's end.
  void abort() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  // Registered memory (Group::allocate_registered), `size` elements. Throws
  // c10::DistBackendError if there is not that much.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void all_reduce_direct(void* data, int64_t count, at::ScalarType dtype,
                         c10d::ReduceOp::RedOpType op,
                         milliseconds timeout) override;

  std::unique_ptr<BucketReduction> reduce_buckets(
      std::vector<ReducedBucket> buckets, Results results,
      milliseconds timeout) override;
  std::unique_ptr<SplitBarrier> split_barrier(milliseconds timeout) override;
  at::Tensor zeros_in_common(int64_t count, const at::TensorOptions& options,
                             milliseconds timeout) override;
  bool shares(const void* data, size_t bytes) const override;

  std::string departures() const override;
  bool knows_all_peers() const override { return true; }
  void leave() override;

 private:
  milliseconds allowed(milliseconds given) const {
    return given == c10d::kUnsetTimeout ? timeout_ : given;
  }
  // `operation(Group&, const Deadline&)`, in its turn: here, or on the thread.
  template <typename CallOptions, typename Operation>
  WorkPtr issue(c10d::OpType type, const CallOptions& options, Tensors results,
                Operation operation);
  // Runs `operation()` when it is its turn, or breaks the group: its peers
  // count a call that this rank did not come to, or left half done.
  template <typename Operation>
  void run_in_turn(milliseconds timeout, Operation&& operation);
  template <typename Operation>
  void run_or_break(Operation&& operation);
  // By whose turn it is.
  void count_one() {
    begun_.store(begun_.load(std::memory_order_relaxed) + 1,
                 std::memory_order_relaxed);
  }

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Messages> messages_;
  const std::shared_ptr<SharedTensors> shared_;
  const milliseconds timeout_;
  std::atomic<uint64_t> begun_{0};
  std::optional<WorkQueue> queue_;
};

template <typename Operation>
void Backend::run_or_break(Operation&& operation) {
  count_one();
  try {
    translated(std::forward<Operation>(operation));
  } catch (const c10::DistBackendError&) {
    throw;  // of the protocol: all ranks have it, or the group is broken
  } catch (const std::exception& error) {
    group_->hang_up(words_of(error));
    throw;
  }
}

template <typename Operation>
void Backend::run_in_turn(milliseconds timeout, Operation&& operation) {
  bool begun = false;
  try {
    queue_->run(timeout, [&] {
      begun = true;
      run_or_break(std::forward<Operation>(operation));
    });
  } catch (const std::exception& error) {
    if (!begun) group_->hang_up(words_of(error));
    throw;
  }
}

template <typename CallOptions, typename Operation>
Backend::WorkPtr Backend::issue(c10d::OpType type, const CallOptions& options,
                                Tensors results, Operation operation) {
  const auto timeout = allowed(options.timeout);
  const auto deadline = Deadline::after(timeout);
  // Pieces in the operation let go of tensors when it does: on the thread too.
  auto step = [this, deadline, run = std::move(operation)] {
    run(*group_, deadline);
  };
  if (!options.asyncOp) {
    run_in_turn(timeout, step);
    return completed_work();
  }
  try {
    return queue_->enqueue(getRank(), type, timeout, std::move(results),
                           [this, step = std::move(step)] {
                             const Standstill::OnQueue on_queue;
                             run_or_break(step);
                           });
  } catch (const std::exception& error) {
    group_->hang_up(words_of(error));
    throw;
  }
}

}  // namespace lockstep::shm

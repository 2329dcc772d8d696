#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/shm/protocol/group.h"
#include "lockstep/comm/shm/protocol/standstill.h"
#include "lockstep/comm/shm/protocol_call.h"
#include "lockstep/comm/work_queue.h"

namespace lockstep::internal::shm {

class Messages;

// Knows where the tensors lie that are in memory shared by the ranks. Threads:
// any.
class SharedTensors {
 public:
  void add(const void* data, size_t bytes);
  void remove(const void* data);
  // Returns whether [data, data + bytes) lies in one of them.
  bool hold(const void* data, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<const std::byte*, size_t> sizes_{};
};

// Makes the protocol of a Group a c10d::Backend.
//
// Collectives run one after the other, through a WorkQueue. With asyncOp false
// a collective runs in the calling thread, and its errors are thrown at once;
// otherwise it runs on the queue's thread, or in Work::wait(). Messages may be
// in any order with collectives. A message that does not end at once goes on
// even if no thread waits for it, on a thread that the first such message
// starts.
//
// Tensors must be in host memory and dense (allreduce takes sparse ones, too).
// Operations that only move data take any dtype. A tensor that is not
// contiguous goes through a copy. An input and an output may overlap only if
// they belong to the same rank and are the same memory.
//
// Errors: std::invalid_argument for a mistake of this rank,
// c10::DistBackendError for all else (protocol/group.h says what they name).
//
// Threads: any; the caller must put the collectives in order. The destructor
// waits for pending collectives and drops pending messages. No other thread may
// use the backend while the destructor runs. Tensors from allocateTensor() may
// outlive the backend.
class Backend final : public c10d::Backend,
                      public DirectReduce,
                      public BackendTraits,
                      public HostSharing,
                      public PeerNotices {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // `timeout` is for operations that name none.
  Backend(const Membership& membership, milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "shm"; }
  bool takes_lists_at_once() const override { return true; }

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

  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
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

  // Each takes one tensor. The works have no futures.
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Fails all pending and all later operations. The peers' operations fail,
  // too, with an error that names this rank.
  void abort() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  // Returns `size` elements in registered memory
  // (Group::allocate_registered()). Throws c10::DistBackendError if the system
  // does not have that much.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void all_reduce_direct(void* data, int64_t count, at::ScalarType dtype,
                         c10d::ReduceOp::RedOpType op,
                         milliseconds timeout) override;

  std::unique_ptr<BucketReduction> reduce_buckets(
      std::vector<ReducedBucket> buckets, Results results,
      const ProcessGroupPtr& group, milliseconds timeout,
      const at::Tensor& arena = {}) override;
  std::unique_ptr<SplitBarrier> split_barrier(milliseconds timeout) override;
  at::Tensor zeros_in_common(int64_t count, const at::TensorOptions& options,
                             milliseconds timeout) override;
  bool shares(const void* data, size_t bytes) const override;

  std::string departures() const override;
  bool knows_all_peers() const override { return true; }
  void abort_because(const std::string& cause) override;
  void keep_cause(const std::string& cause) override;
  void leave() override;

 private:
  void close_queue(const std::function<void()>& tell_peers);
  milliseconds allowed(milliseconds given) const {
    return given == c10d::kUnsetTimeout ? timeout_ : given;
  }
  // Runs `operation(Group&, const Deadline&)` when its turn comes: in the
  // calling thread, or on the queue's thread.
  template <typename CallOptions, typename Operation>
  WorkPtr issue(c10d::OpType type, const CallOptions& options, Tensors results,
                Operation operation);
  // Runs `operation(left)` when its turn comes, with what is left of `timeout`.
  // Breaks the group if the turn does not come, or if the operation fails on
  // this rank only: the peers count a call that this rank did not make, or left
  // half done.
  template <typename Operation>
  void run_in_turn(milliseconds timeout, Operation&& operation);
  template <typename Operation>
  void run_or_break(Operation&& operation);

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Messages> messages_;
  const std::shared_ptr<SharedTensors> shared_;
  const milliseconds timeout_;
  std::optional<WorkQueue> queue_;
};

template <typename Operation>
void Backend::run_or_break(Operation&& operation) {
  translated([&] {
    try {
      std::forward<Operation>(operation)();
    } catch (const GroupBroken&) {
      throw;
    } catch (const CallMismatch&) {
      throw;  // all ranks get it
    } catch (const Unavailable&) {
      throw;  // all ranks get it
    } catch (const std::exception& error) {
      group_->hang_up(words_of(error));
      throw;
    }
  });
}

template <typename Operation>
void Backend::run_in_turn(milliseconds timeout, Operation&& operation) {
  bool begun = false;
  try {
    queue_->run(timeout, [&](milliseconds left) {
      begun = true;
      run_or_break([&] { operation(left); });
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
  // The operation's Pieces release their tensors when the operation is
  // destroyed, on the queue's thread too.
  auto step = [this, deadline, run = std::move(operation)] {
    run(*group_, deadline);
  };
  if (!options.asyncOp) {
    run_in_turn(timeout, [&](milliseconds) { step(); });
    return completed_work();
  }
  try {
    return queue_->enqueue(
        getRank(), type, timeout, std::move(results),
        [this, step = std::move(step)] {
          const Standstill::OnQueue on_queue(WorkQueue::on_own_thread());
          run_or_break(step);
        });
  } catch (const std::exception& error) {
    group_->hang_up(words_of(error));
    throw;
  }
}

}  // namespace lockstep::internal::shm

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/life_signs.h"
#include "lockstep/comm/process_group.h"
#include "memory_pool.h"

namespace lockstep::internal::python {

// The arguments with which Python's torch.distributed makes a backend. `kind`
// is a backend of Lockstep's registry, "lockstep" or "shm". `global_ranks` is
// empty for the default group.
struct Request {
  std::string kind;
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string group_name;
  std::vector<int> global_ranks;
};

// A process group of Lockstep as a backend of Python's torch.distributed. Each
// operation calls Lockstep's public function, so a Python rank makes the same
// calls as a C++ rank: both can be in one group, and checks, errors, flight
// records and spans are the same.
//
// Ranks that torch.distributed passes to a backend are those of the group.
//
// Threads: as lockstep::ProcessGroup. No function needs the GIL, and operations
// must be called without it: they wait for peers, and a future's callback may
// be Python's.
class Backend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // Blocks until the ranks have met, for request.timeout at most. Throws what
  // the backend's create() throws.
  explicit Backend(Request request);
  ~Backend() override;

  const std::string getBackendName() const override;
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  // Number the collectives of this rank from 1.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_; }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;

  // Memory that the ranks share, if they are all on one host: operations on it
  // copy less. May be memory of an earlier tensor (MemoryPool).
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors,
                           const c10d::AllreduceOptions& options) override {
    return allreduce(tensors, options);
  }
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
  // The error names every rank that does not come, with or without
  // `wait_all_ranks`.
  void monitoredBarrier(const c10d::BarrierOptions& options,
                        bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Fails pending and later operations here, and operations in which peers wait
  // for this rank.
  void abort() override;
  // Waits for pending operations, and then tells the peers that this rank has
  // left. If a handler of a Python signal raises meanwhile, does what abort()
  // does, and throws that exception.
  void shutdown() override { shutdown_within(kBoundedTimeout); }
  // Does the same, but aborts operations that are pending after `limit`.
  void shutdown_within(std::chrono::milliseconds limit);

 private:
  template <typename LockstepOptions, typename Given>
  LockstepOptions options_of(const Given& given) const;
  template <typename Given>
  ReductionOptions reduction_of(const Given& given) const;
  // Runs `operation`, a function of the library, and makes its work one that
  // torch.distributed expects.
  template <typename Operation>
  WorkPtr run(const Operation& operation) const;
  // Does the same and counts a collective.
  template <typename Operation>
  WorkPtr collect(const Operation& operation);
  // Runs `operation` for 0 to `count` - 1 and joins the works.
  template <typename Operation>
  WorkPtr collect_each(size_t count, const Operation& operation);
  int global(int64_t rank) const;
  // Tells the ranks of the default group that this rank has left.
  void sign_off();
  // Throws if operations are still pending after `limit`, or if a handler of a
  // signal raises meanwhile.
  void await_pending(std::chrono::milliseconds limit) const;
  // Ends the group. Signals cannot end its wait for pending operations.
  void leave();

  const std::string kind_;
  const bool default_group_;
  std::atomic<std::chrono::milliseconds> timeout_;
  const ProcessGroupPtr group_;
  const std::shared_ptr<LifeSigns> life_signs_;  // if it is the default group
  std::atomic<uint64_t> collectives_{0};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> left_{false};
  const std::shared_ptr<MemoryPool> memory_ = std::make_shared<MemoryPool>();
};

// Ends all backends of this process, and tells the peers that this rank has
// left. Pending operations fail: at once if `failed`, otherwise if they have
// not ended after five seconds. Throws what a handler of a Python signal
// raises. Call it before the interpreter ends.
void leave_all(bool failed);

}  // namespace lockstep::internal::python

#pragma once

// Stands for LibTorch's header of this name, which needs CUDA and NCCL, so that
// lockstep/comm/nccl/create.cpp, as users have it, runs on the simulated
// device. The class has the interface and the behaviour of c10d's; below it
// real processes exchange their data through Lockstep's shared memory.
//
// What it does as NCCL and c10d do:
//
// - An asynchronous operation runs on a stream of the group's own, after an
//   event of the current stream, and in the order of the calls. A synchronous
//   one runs on the current stream. The host never waits, except in the wait of
//   a barrier and in a wait with a timeout.
// - The work of an asynchronous operation holds its tensors until wait() or
//   until the operation has ended.
// - Messages have no tags, and a send ends when the peer receives: ranks that
//   both send first wait for each other, unless the messages are coalesced.
// - It takes dense, contiguous tensors on the device that it is bound to, of
// the
//   dtypes that NCCL has. Two ranks on one device are an error in the connect.
// - A peer that dies or is absent is not noticed: operations wait until the
//   watchdog finds that their time is over and ends the process
//   (TORCH_NCCL_ASYNC_ERROR_HANDLING=2: only the communicator).
//
// It does not have: c10d's flight recorder and heartbeat monitor, splitting,
// shrinking, graphs, sparse tensors, symmetric memory.

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace c10d {

class SimulatedNcclWork;

class ProcessGroupNCCL : public Backend {
 public:
  struct Options : Backend::Options {
    Options() : Backend::Options("nccl") {}
    static c10::intrusive_ptr<Options> create() {
      return c10::make_intrusive<Options>();
    }
    bool is_high_priority_stream = false;
  };

  ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size,
                   c10::intrusive_ptr<Options> options);
  ProcessGroupNCCL(const ProcessGroupNCCL&) = delete;
  ProcessGroupNCCL& operator=(const ProcessGroupNCCL&) = delete;
  ~ProcessGroupNCCL() override;

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return begun_; }

  // Blocks until all ranks have come, however long that takes.
  void eagerConnectSingleDevice(at::Device device) override;

  void startCoalescing() override;
  c10::intrusive_ptr<Work> endCoalescing() override;

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<Work>;
  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const AllToAllOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const ScatterOptions& options) override;
  WorkPtr barrier(const BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;

  // Ends the operations that are pending, as if they had succeeded.
  void abort() override;
  // Waits for the operations that are pending and closes the communicator.
  void shutdown() override;

 protected:
  // Ends the operations that are pending with an error that says `reason`.
  void abortComms(const std::optional<std::string>& reason = std::nullopt);

  const c10::intrusive_ptr<Store> store_;

 private:
  friend class SimulatedNcclWork;
  // The transport below, and the end of a communicator. Operations that a
  // stream still runs hold it.
  class Communicator;
  // The thread that finds operations whose time is over, and failures.
  class Watchdog;
  using OnHost = std::function<void(Backend& transport)>;

  void require_tensors(const Tensors& tensors) const;
  // Checks `tensors`, and enqueues what `prepare` returns: a function that
  // moves the data between CPU tensors which stand for them. `outputs` are the
  // values of the future.
  WorkPtr enqueue(OpType type, const Tensors& tensors, Tensors outputs,
                  std::chrono::milliseconds timeout, bool async_op,
                  const std::function<OnHost()>& prepare);
  WorkPtr message(OpType type, at::Tensor tensor, int peer);
  void require_usable() const;

  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Communicator> communicator_{};
  std::optional<c10::Stream> stream_{};
  // The end of the operation before. NCCL runs those of a communicator in the
  // order of the calls, whatever their streams are.
  std::optional<c10::Event> last_{};
  uint64_t begun_ = 0;

  struct Message {
    bool sends;
    int peer;
    at::Tensor memory;  // on the host
  };
  static void exchange(Backend& transport, std::vector<Message> messages);
  bool coalescing_ = false;
  std::vector<Message> coalesced_messages_{};
  std::vector<OnHost> coalesced_{};
  Tensors coalesced_tensors_{};
  std::unique_ptr<Watchdog> watchdog_{};
};

}  // namespace c10d

#pragma once

// Replaces LibTorch's header of this name, for lockstep/comm/nccl: c10d's NCCL
// backend for the simulated devices, between processes of one host. As c10d's,
//
// - it runs an asynchronous operation on a stream of its own, after what the
//   current stream had been given, and a synchronous one on the current stream,
//   without a work. Operations of a group run one after the other.
// - Work::wait() makes the current stream wait and not the host, unless it is
//   given a time. The host does not own the tensors of an operation: the work
//   keeps them until wait(), or until the operation has ended.
// - it takes contiguous, dense tensors of the device that it is bound to, and
//   only the dtypes and reductions of NCCL. Two ranks may not have one device.
// - a message ends when the other side has taken it. Single messages of two
//   ranks run one after the other; only those of a batch (startCoalescing())
//   run at the same time.
// - it does not notice that a peer has died: the operation goes on, until a
//   watchdog ends the process after the timeout, or until abort(). The same
//   happens where ranks call different operations, which NCCL does not define.
//
// The ranks exchange bytes by Lockstep's backend "shm".

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace c10d {

class ProcessGroupNCCL : public Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<Work>;

  struct Options : Backend::Options {
    explicit Options(bool high_priority)
        : Backend::Options("nccl", std::chrono::minutes(10)),
          is_high_priority_stream(high_priority) {}
    static c10::intrusive_ptr<Options> create(bool high_priority = false) {
      return c10::make_intrusive<Options>(high_priority);
    }
    bool is_high_priority_stream;
  };

  ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size,
                   c10::intrusive_ptr<Options> options);
  ~ProcessGroupNCCL() override;

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void eagerConnectSingleDevice(at::Device device) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  // Waits for all operations, and then closes the connections.
  void shutdown() override;
  // Ends pending operations as if they had succeeded.
  void abort() override;
  // Ends pending operations; if there is a reason, their works throw it, and
  // the watchdog ends the process (unless TORCH_NCCL_ASYNC_ERROR_HANDLING is
  // 0).
  bool abortComms(const std::optional<std::string>& reason = std::nullopt);

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ReduceScatterOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const AllToAllOptions& options) override;
  WorkPtr barrier(const BarrierOptions& options) override;

  // NCCL knows no tags: messages between two ranks stay in order.
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

 protected:
  c10::intrusive_ptr<Store> store_;

 private:
  class NcclWork;
  struct Communicator;
  // Does a part of an operation, in a task of a stream. The messages of a batch
  // wait for each other, so all do one part before the first does the next.
  enum class Part { begin, take, end };
  using Transfer = std::function<void(Backend& wire, Part part)>;
  struct Operation {
    OpType type;
    bool async;
    std::chrono::milliseconds timeout;
    Tensors outputs;
    Tensors inputs;
    Transfer transfer;
  };

  template <typename CallOptions, typename Run>
  WorkPtr collective(OpType type, const CallOptions& options, Tensors outputs,
                     Tensors inputs, Run run);
  WorkPtr issue(Operation operation);
  WorkPtr start(Operation operation, const c10::Stream& stream);
  WorkPtr message(OpType type, Tensors& tensors, int peer);
  void check_tensors(const Tensors& tensors) const;
  c10::Stream stream_for(const std::string& use);
  std::chrono::milliseconds allowed(std::chrono::milliseconds given) const;
  std::string retire_ended();
  void watch(const std::stop_token& stop);

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Communicator> communicator_;
  std::optional<at::Device> device_;
  uint64_t issued_ = 0;
  // By use: "" for collectives and batches, otherwise the peer of messages.
  std::map<std::string, c10::Stream> streams_;
  // What has been started since startCoalescing().
  std::optional<std::vector<Operation>> coalesced_;
  std::mutex pending_mutex_;
  std::list<c10::intrusive_ptr<NcclWork>> pending_;
  std::jthread watchdog_;  // the last member, as it uses the others
};

}  // namespace c10d

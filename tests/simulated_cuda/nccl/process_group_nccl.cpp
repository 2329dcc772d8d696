#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/shm/create.h"
#include "lockstep/comm/shm/protocol/handshake.h"
#include "tests/simulated_cuda/settings.h"
#include "tests/simulated_cuda/simulated_cuda.h"

namespace c10d {

using lockstep::internal::BackendRequest;
using lockstep::internal::simulated_cuda::kDeviceType;
using lockstep::internal::simulated_cuda::memory_of;
using std::chrono::milliseconds;

namespace {

// Works of "shm" end with the errors of dead peers at once; only the watchdog
// limits their time.
constexpr std::chrono::hours kNoLimit(24);
// Between two looks of the watchdog.
constexpr milliseconds kPause(50);

constexpr int kDataTag = 0;
constexpr int kTakenTag = 1;

const c10::impl::VirtualGuardImpl& accelerator() {
  static const c10::impl::VirtualGuardImpl implementation(kDeviceType);
  return implementation;
}

std::vector<at::Tensor> memory_of_each(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  for (const at::Tensor& tensor : tensors) views.push_back(memory_of(tensor));
  return views;
}

// Returns options for "shm", which shall run the operation in the task.
template <typename GivenOptions>
GivenOptions in_task(GivenOptions options) {
  options.timeout = kNoLimit;
  options.asyncOp = false;
  return options;
}

// TORCH_NCCL_ASYNC_ERROR_HANDLING: what the watchdog does after a failure.
enum class ErrorHandling { kNone = 0, kEndProcess = 1, kEndOperations = 2 };

ErrorHandling error_handling() {
  const char* const text = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  const int given = text ? std::atoi(text) : 3;
  return given == 0 || given == 2 ? static_cast<ErrorHandling>(given)
                                  : ErrorHandling::kEndProcess;
}

bool waits_block() {
  const char* const text = std::getenv("TORCH_NCCL_BLOCKING_WAIT");
  return text && std::string(text) == "1";
}

void check_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return;
    default:
      TORCH_CHECK(false,
                  "Input tensor data type is not supported for NCCL process "
                  "group: ",
                  tensor.scalar_type());
  }
}

void check_reduction(const ReduceOp& op, const at::Tensor& tensor) {
  const auto type = static_cast<ReduceOp::RedOpType>(op);
  TORCH_CHECK(type == ReduceOp::SUM || type == ReduceOp::PRODUCT ||
                  type == ReduceOp::MIN || type == ReduceOp::MAX ||
                  type == ReduceOp::AVG,
              "Cannot use this ReduceOp with NCCL: number ", int{type});
  TORCH_CHECK(type != ReduceOp::AVG || tensor.scalar_type() != at::kBool,
              "Cannot use ReduceOp.AVG with Boolean inputs");
}

}  // namespace

// The connections of this rank, which tasks of streams use.
struct ProcessGroupNCCL::Communicator {
  c10::intrusive_ptr<Backend> wire;
  std::mutex mutex;
  std::condition_variable aborted_or_not;
  bool aborted = false;
  std::string reason;  // why it was aborted, if that was said

  void run(const Transfer& transfer) {
    try {
      for (const Part part : {Part::begin, Part::take, Part::end}) {
        transfer(*wire, part);
      }
    } catch (const std::exception&) {
      std::unique_lock lock(mutex);
      // The kernels of NCCL wait for ever.
      aborted_or_not.wait(lock, [this] { return aborted; });
    }
  }
  // Ends all tasks, and those to come.
  void abort(const std::string& why = {}) {
    {
      const std::lock_guard lock(mutex);
      if (!aborted) reason = why;
      aborted = true;
    }
    wire->abort();
    aborted_or_not.notify_all();
  }
  void require_not_aborted(int rank) {
    const std::lock_guard lock(mutex);
    if (!aborted) return;
    C10_THROW_ERROR(
        DistBackendError,
        c10::str("NCCL communicator was aborted on rank ", rank, ". ",
                 reason.empty()
                     ? ""
                     : " Original reason for failure was: " + reason));
  }
};

class ProcessGroupNCCL::NcclWork final : public Work {
 public:
  NcclWork(int rank, Operation& operation, at::Device device, uint64_t number,
           std::shared_ptr<Communicator> communicator)
      : Work(rank, operation.type),
        device_(device),
        number_(number),
        timeout_(operation.timeout),
        communicator_(std::move(communicator)),
        outputs_(operation.outputs),
        kept_(operation.outputs) {
    kept_.insert(kept_.end(), operation.inputs.begin(), operation.inputs.end());
  }

  // Called when the operation has been enqueued.
  void started_on(const c10::Stream& stream) {
    end_.record(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{device_});
    const c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool has_ended() const { return end_.query(); }
  bool isCompleted() override { return exception() || has_ended(); }
  bool isSuccess() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "WorkNCCL::isSuccess() is deprecated");
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  // Completes when the watchdog has seen the end.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return result_;
  }
  uint64_t getSequencenumber() const override { return number_; }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { communicator_->abort(); }

  bool wait(milliseconds timeout) override {
    const c10::Stream current = accelerator().getStream(device_);
    end_.block(current);
    if (timeout == kNoTimeout && waits_block()) timeout = timeout_;
    if (timeout != kNoTimeout) {
      const auto deadline = std::chrono::steady_clock::now() + timeout;
      while (!isCompleted()) {
        if (std::chrono::steady_clock::now() >= deadline) {
          fail(words_of_timeout(timeout), /*ends_process=*/false);
          communicator_->abort();
          break;
        }
        std::this_thread::sleep_for(milliseconds(1));
      }
    }
    if (opType_ == OpType::BARRIER) accelerator().synchronizeStream(current);
    release();
    if (const auto error = exception()) std::rethrow_exception(error);
    return true;
  }

  // Lets go of the tensors: what comes on the stream of the caller, or the
  // host, is after the operation.
  void release() {
    const std::lock_guard lock(mutex_);
    kept_.clear();
  }
  // Ends the work with an error. `ends_process`: the watchdog shall see it.
  void fail(const std::string& reason, bool ends_process) {
    const std::lock_guard lock(mutex_);
    if (exception_) return;
    exception_ = std::make_exception_ptr(c10::DistBackendError(reason));
    if (ends_process) fatal_ = reason;
  }
  std::string fatal() {
    const std::lock_guard lock(mutex_);
    return fatal_;
  }
  void tell_result(WorkResult result) {
    result_->markCompleted(static_cast<int64_t>(result));
  }
  bool is_overdue() const {
    return std::chrono::steady_clock::now() - began_ > timeout_;
  }
  std::string words_of_timeout(milliseconds timeout) const {
    return c10::str("[Rank ", rank_,
                    "] Watchdog caught collective operation timeout: "
                    "WorkNCCL(SeqNum=",
                    number_, ", OpType=", opTypeToString(opType_),
                    ", Timeout(ms)=", timeout.count(), ")");
  }
  milliseconds timeout() const { return timeout_; }

 private:
  const at::Device device_;
  const uint64_t number_;
  const milliseconds timeout_;
  const std::chrono::steady_clock::time_point began_ =
      std::chrono::steady_clock::now();
  const std::shared_ptr<Communicator> communicator_;
  std::string fatal_;  // why the watchdog shall end the process
  const std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> kept_;
  c10::Event end_{kDeviceType};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  const c10::intrusive_ptr<c10::ivalue::Future> result_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
};

ProcessGroupNCCL::ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank,
                                   int size,
                                   c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)) {
  TORCH_CHECK(accelerator().deviceCount() > 0,
              "ProcessGroupNCCL is only supported with GPUs, no GPUs found!");
}

ProcessGroupNCCL::~ProcessGroupNCCL() { abortComms(); }

uint64_t ProcessGroupNCCL::getSequenceNumberForGroup() { return issued_; }

milliseconds ProcessGroupNCCL::allowed(milliseconds given) const {
  return given == kUnsetTimeout ? options_->timeout : given;
}

void ProcessGroupNCCL::eagerConnectSingleDevice(at::Device device) {
  BackendRequest request{
      .store = c10::make_intrusive<PrefixStore>("simulated_nccl", store_),
      .rank = getRank(),
      .size = getSize(),
      .timeout = options_->timeout,
      .group_name = options_->group_name,
      .global_ranks = {options_->global_ranks_in_group.begin(),
                       options_->global_ranks_in_group.end()}};
  const auto devices = lockstep::internal::gather_texts(
      request.members(), "device/",
      c10::str(
          lockstep::internal::shm::host_identity(), " ",
          lockstep::internal::simulated_cuda::physical_index(device.index())),
      lockstep::internal::Deadline::after(request.timeout));
  for (size_t i = 0; i < devices.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      if (devices[i] != devices[k]) continue;
      C10_THROW_ERROR(DistBackendError,
                      c10::str("NCCL error: Duplicate GPU detected : rank ", i,
                               " and rank ", k, " both on CUDA device ",
                               devices[i].substr(devices[i].rfind(' ') + 1)));
    }
  }
  communicator_ = std::make_shared<Communicator>();
  communicator_->wire = lockstep::internal::shm::create(request);
  device_ = device;
  watchdog_ =
      std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

void ProcessGroupNCCL::shutdown() {
  if (!communicator_) return;
  for (;;) {
    {
      const std::lock_guard lock(pending_mutex_);
      if (pending_.empty()) break;
    }
    accelerator().synchronizeDevice(device_->index());
    retire_ended();
  }
  watchdog_ = {};
  communicator_.reset();
}

void ProcessGroupNCCL::abort() { abortComms(); }

bool ProcessGroupNCCL::abortComms(const std::optional<std::string>& reason) {
  if (!communicator_) return true;
  if (reason) {
    const std::lock_guard lock(pending_mutex_);
    for (const auto& work : pending_)
      work->fail(*reason, /*ends_process=*/true);
  }
  communicator_->abort(reason.value_or(""));
  return true;
}

// Ends the works whose operations have ended. Returns why the process must end.
std::string ProcessGroupNCCL::retire_ended() {
  std::string reason;
  std::vector<c10::intrusive_ptr<NcclWork>> ended;  // freed without the lock
  {
    const std::lock_guard lock(pending_mutex_);
    for (auto work = pending_.begin(); work != pending_.end();) {
      if ((*work)->is_overdue() && !(*work)->isCompleted() && !waits_block()) {
        (*work)->fail((*work)->words_of_timeout((*work)->timeout()),
                      /*ends_process=*/true);
      }
      if (reason.empty()) reason = (*work)->fatal();
      if ((*work)->isCompleted()) {
        ended.push_back(*work);
        work = pending_.erase(work);
      } else {
        ++work;
      }
    }
  }
  for (const auto& work : ended) {
    work->release();
    work->tell_result(work->exception() ? WorkResult::COMM_ERROR
                                        : WorkResult::SUCCESS);
  }
  return reason;
}

void ProcessGroupNCCL::watch(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "nccl watchdog");
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock waiting(mutex);
  while (!stopped.wait_for(waiting, stop, kPause,
                           [&] { return stop.stop_requested(); })) {
    const std::string reason = retire_ended();
    if (reason.empty() || error_handling() == ErrorHandling::kNone) continue;
    std::fprintf(stderr, "Some NCCL operations have failed or timed out: %s.\n",
                 reason.c_str());
    if (error_handling() == ErrorHandling::kEndProcess) {
      std::fprintf(stderr,
                   "To avoid data inconsistency, we are taking the entire "
                   "process down.\n");
      // As in c10d, nobody catches this, so that it ends the process.
      C10_THROW_ERROR(DistBackendError,
                      c10::str("[Rank ", getRank(),
                               "] Process group watchdog thread terminated "
                               "with exception: ",
                               reason));
    }
    communicator_->abort(reason);
  }
}

c10::Stream ProcessGroupNCCL::stream_for(const std::string& use) {
  const auto found = streams_.find(use);
  if (found != streams_.end()) return found->second;
  return streams_
      .emplace(use, accelerator().getStreamFromGlobalPool(
                        *device_, options_->is_high_priority_stream))
      .first->second;
}

void ProcessGroupNCCL::check_tensors(const Tensors& tensors) const {
  TORCH_CHECK(communicator_, "ProcessGroupNCCL: the group is not connected");
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.device().type() == kDeviceType &&
                    tensor.layout() == at::kStrided,
                "Tensors must be on a device and dense");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK(tensor.device() == *device_,
                "ProcessGroupNCCL: a tensor is on ", tensor.device(),
                ", but the group is bound to ", *device_);
    check_dtype(tensor);
  }
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::issue(Operation operation) {
  if (coalesced_) {
    coalesced_->push_back(std::move(operation));
    return {};
  }
  const bool async = operation.async;
  return start(std::move(operation),
               async ? stream_for("") : accelerator().getStream(*device_));
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::start(Operation operation,
                                                  const c10::Stream& stream) {
  communicator_->require_not_aborted(getRank());
  const c10::Stream current = accelerator().getStream(*device_);
  const auto wait_for = [&](const c10::Stream& other) {
    if (other == stream) return;
    c10::Event event(kDeviceType);
    event.record(other);
    event.block(stream);
  };
  wait_for(current);
  // NCCL keeps the operations of a group in order, whatever their streams are.
  const bool is_message = isP2POp(operation.type);
  if (!is_message) wait_for(stream_for(""));
  auto work = c10::make_intrusive<NcclWork>(getRank(), operation, *device_,
                                            ++issued_, communicator_);
  lockstep::internal::simulated_cuda::enqueue(
      stream,
      [communicator = communicator_, transfer = std::move(operation.transfer)] {
        communicator->run(transfer);
      });
  if (!is_message && stream != stream_for("")) {
    c10::Event event(kDeviceType);
    event.record(stream);
    event.block(stream_for(""));
  }
  work->started_on(stream);
  {
    const std::lock_guard lock(pending_mutex_);
    pending_.push_back(work);
  }
  if (!operation.async) {
    // The tensors belong to the stream that the operation is on.
    work->release();
    return {};
  }
  return work;
}

void ProcessGroupNCCL::startCoalescing() { coalesced_.emplace(); }

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::endCoalescing() {
  std::vector<Operation> operations =
      std::exchange(coalesced_, std::nullopt).value();
  if (operations.empty()) return {};
  Operation all{.type = OpType::COALESCED,
                .async = true,
                .timeout = operations.front().timeout,
                .outputs = {},
                .inputs = {},
                .transfer = {}};
  std::vector<Transfer> transfers;
  for (Operation& each : operations) {
    all.outputs.insert(all.outputs.end(), each.outputs.begin(),
                       each.outputs.end());
    all.inputs.insert(all.inputs.end(), each.inputs.begin(), each.inputs.end());
    transfers.push_back(std::move(each.transfer));
  }
  all.transfer = [transfers = std::move(transfers)](Backend& wire, Part part) {
    for (const Transfer& transfer : transfers) transfer(wire, part);
  };
  return start(std::move(all), stream_for(""));
}

// Issues a collective: `run` calls it on `wire` with the views of the outputs
// and inputs.
template <typename CallOptions, typename Run>
ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::collective(
    OpType type, const CallOptions& options, Tensors outputs, Tensors inputs,
    Run run) {
  check_tensors(outputs);
  check_tensors(inputs);
  return issue({.type = type,
                .async = options.asyncOp,
                .timeout = allowed(options.timeout),
                .outputs = outputs,
                .inputs = inputs,
                .transfer = [run, options = in_task(options),
                             to = memory_of_each(outputs),
                             from = memory_of_each(inputs)](Backend& wire,
                                                            Part part) mutable {
                  if (part == Part::begin) run(wire, to, from, options);
                }});
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::allreduce(
    Tensors& tensors, const AllreduceOptions& options) {
  const at::Tensor& tensor = tensors.at(0);
  check_reduction(options.reduceOp, tensor);
  return collective(OpType::ALLREDUCE, options, tensors, {},
                    [](Backend& wire, Tensors& to, Tensors&,
                       const auto& given) { wire.allreduce(to, given); });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::allreduce_coalesced(
    Tensors& tensors, const AllreduceCoalescedOptions& options) {
  for (const at::Tensor& tensor : tensors) {
    check_reduction(options.reduceOp, tensor);
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(),
                "Tensors must have identical type");
  }
  return collective(
      OpType::ALLREDUCE_COALESCED, options, tensors, {},
      [](Backend& wire, Tensors& to, Tensors&, const auto& given) {
        wire.allreduce_coalesced(to, given);
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::reduce(
    Tensors& tensors, const ReduceOptions& options) {
  check_reduction(options.reduceOp, tensors.at(0));
  return collective(OpType::REDUCE, options, tensors, {},
                    [](Backend& wire, Tensors& to, Tensors&,
                       const auto& given) { wire.reduce(to, given); });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::reduce_scatter(
    Tensors& outputs, TensorLists& inputs,
    const ReduceScatterOptions& options) {
  check_reduction(options.reduceOp, outputs.at(0));
  return collective(
      OpType::REDUCE_SCATTER, options, outputs, inputs.at(0),
      [](Backend& wire, Tensors& to, Tensors& from, const auto& given) {
        TensorLists lists{from};
        wire.reduce_scatter(to, lists, given);
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const ReduceScatterOptions& options) {
  check_reduction(options.reduceOp, output);
  return collective(
      OpType::_REDUCE_SCATTER_BASE, options, {output}, {input},
      [](Backend& wire, Tensors& to, Tensors& from, const auto& given) {
        wire._reduce_scatter_base(to[0], from[0], given);
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::broadcast(
    Tensors& tensors, const BroadcastOptions& options) {
  return collective(OpType::BROADCAST, options, tensors, {},
                    [](Backend& wire, Tensors& to, Tensors&,
                       const auto& given) { wire.broadcast(to, given); });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::allgather(
    TensorLists& outputs, Tensors& inputs, const AllgatherOptions& options) {
  return collective(
      OpType::ALLGATHER, options, outputs.at(0), inputs,
      [](Backend& wire, Tensors& to, Tensors& from, const auto& given) {
        TensorLists lists{to};
        wire.allgather(lists, from, given);
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::_allgather_base(
    at::Tensor& output, at::Tensor& input, const AllgatherOptions& options) {
  return collective(
      OpType::_ALLGATHER_BASE, options, {output}, {input},
      [](Backend& wire, Tensors& to, Tensors& from, const auto& given) {
        wire._allgather_base(to[0], from[0], given);
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::gather(
    TensorLists& outputs, Tensors& inputs, const GatherOptions& options) {
  const bool is_root = getRank() == options.rootRank;
  return collective(
      OpType::GATHER, options, is_root ? outputs.at(0) : Tensors(), inputs,
      [is_root](Backend& wire, Tensors& to, Tensors& from, const auto& given) {
        TensorLists lists;
        if (is_root) lists.push_back(to);
        wire.gather(lists, from, given);
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::scatter(
    Tensors& outputs, TensorLists& inputs, const ScatterOptions& options) {
  const bool is_root = getRank() == options.rootRank;
  return collective(
      OpType::SCATTER, options, outputs, is_root ? inputs.at(0) : Tensors(),
      [is_root](Backend& wire, Tensors& to, Tensors& from, const auto& given) {
        TensorLists lists;
        if (is_root) lists.push_back(from);
        wire.scatter(to, lists, given);
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const AllToAllOptions& options) {
  return collective(
      OpType::ALLTOALL_BASE, options, {output}, {input},
      [output_splits, input_splits](Backend& wire, Tensors& to, Tensors& from,
                                    const auto& given) mutable {
        wire.alltoall_base(to[0], from[0], output_splits, input_splits, given);
      });
}

// As in c10d, the host waits, if not before the work's wait().
ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::barrier(
    const BarrierOptions& options) {
  const c10::DeviceGuard guard(*device_);
  const at::Tensor token =
      at::empty({1}, at::TensorOptions(*device_).dtype(at::kByte));
  auto work = collective(OpType::BARRIER, options, {token}, {},
                         [](Backend& wire, Tensors&, Tensors&,
                            const auto& given) { wire.barrier(given); });
  if (!work) accelerator().synchronizeStream(accelerator().getStream(*device_));
  return work;
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::message(OpType type,
                                                    Tensors& tensors,
                                                    int peer) {
  check_tensors(tensors);
  TORCH_CHECK(peer != getRank(), "Invalid rank ", peer,
              ": a rank cannot send to itself");
  struct Message {
    Tensors data;
    Tensors taken{at::zeros({1}, at::kByte)};
    WorkPtr data_work;
    WorkPtr taken_work;
  };
  auto state = std::make_shared<Message>();
  state->data = memory_of_each(tensors);
  const bool sends = type == OpType::SEND;
  Operation operation{
      .type = type,
      .async = true,
      .timeout = options_->timeout,
      .outputs = tensors,
      .inputs = {},
      .transfer = [state, sends, peer](Backend& wire, Part part) {
        switch (part) {
          case Part::begin:
            if (sends) {
              state->data_work = wire.send(state->data, peer, kDataTag);
              state->taken_work = wire.recv(state->taken, peer, kTakenTag);
            } else {
              state->data_work = wire.recv(state->data, peer, kDataTag);
            }
            break;
          case Part::take:
            if (sends) break;
            state->data_work->wait(kNoLimit);
            state->taken_work = wire.send(state->taken, peer, kTakenTag);
            break;
          case Part::end:
            if (sends) state->data_work->wait(kNoLimit);
            state->taken_work->wait(kNoLimit);
        }
      }};
  if (coalesced_) return issue(std::move(operation));
  return start(std::move(operation),
               stream_for("messages with " + std::to_string(peer)));
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::send(Tensors& tensors, int to,
                                                 int /*tag*/) {
  return message(OpType::SEND, tensors, to);
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::recv(Tensors& tensors, int from,
                                                 int /*tag*/) {
  return message(OpType::RECV, tensors, from);
}

}  // namespace c10d

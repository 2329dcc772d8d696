#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <list>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "lockstep/comm/shm/create.h"
#include "tests/simulated_cuda/simulated_cuda.h"

namespace c10d {
namespace {

using lockstep::internal::simulated_cuda::memory_of;
using lockstep::internal::simulated_cuda::physical_index;
using std::chrono::milliseconds;

using Future = c10::ivalue::Future;

constexpr milliseconds kForever = std::chrono::hours(24);
constexpr milliseconds kWatchdogSleep{50};
constexpr milliseconds kBlockingSleep{10};

// TORCH_NCCL_ASYNC_ERROR_HANDLING: whether an error ends the process (the
// default), and whether the watchdog does anything.
int error_handling() {
  const char* text = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  return text == nullptr ? 3 : std::atoi(text);
}
bool ends_process() { return error_handling() == 1 || error_handling() == 3; }

bool waits_block() {
  const char* text = std::getenv("TORCH_NCCL_BLOCKING_WAIT");
  return text != nullptr && std::string(text) == "1";
}

c10::Stream current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool nccl_knows(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return true;
    default:
      return false;
  }
}

void require_known(const ReduceOp& op, at::ScalarType dtype) {
  if (op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR) {
    C10_THROW_ERROR(ValueError, "Cannot use ReduceOp of bits with NCCL");
  }
  TORCH_CHECK_TYPE(!(op == ReduceOp::AVG && dtype == at::kBool),
                   "Cannot use ReduceOp.AVG with boolean inputs");
}

std::vector<at::Tensor> memory_of_all(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> memory;
  for (const auto& tensor : tensors) memory.push_back(memory_of(tensor));
  return memory;
}

std::vector<std::vector<at::Tensor>> memory_of_lists(
    const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<std::vector<at::Tensor>> memory;
  for (const auto& list : lists) memory.push_back(memory_of_all(list));
  return memory;
}

std::vector<at::Tensor> joined(std::vector<at::Tensor> first,
                               const std::vector<at::Tensor>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Options of the transport: it runs in the thread of the stream, for ever.
template <typename Options>
Options of_transport(Options options) {
  options.timeout = kForever;
  options.asyncOp = false;
  return options;
}

}  // namespace

class ProcessGroupNCCL::Communicator {
 public:
  explicit Communicator(c10::intrusive_ptr<Backend> transport)
      : transport_(std::move(transport)) {}

  // Runs an operation in the thread of a stream. NCCL's kernel would spin if a
  // peer had died, so this waits for abort() if the transport notices that.
  void run(const OnHost& on_host) {
    if (aborted()) return;
    try {
      on_host(*transport_);
    } catch (const c10::DistError&) {
      std::unique_lock lock(mutex_);
      ended_.wait(lock, [&] { return reason_.has_value(); });
    }
  }

  void abort(const std::string& reason) {
    {
      const std::lock_guard lock(mutex_);
      if (reason_) return;
      reason_ = reason;
    }
    transport_->abort();
    ended_.notify_all();
  }

  bool aborted() const { return reason().has_value(); }
  // Why the communicator was aborted; empty if by abort() itself.
  std::optional<std::string> reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
  }

 private:
  const c10::intrusive_ptr<Backend> transport_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::optional<std::string> reason_{};
};

class SimulatedNcclWork final : public Work {
 public:
  SimulatedNcclWork(
      int rank, OpType type, uint64_t number, c10::Device device,
      milliseconds timeout,
      std::shared_ptr<ProcessGroupNCCL::Communicator> communicator)
      : Work(rank, type),
        number_(number),
        device_(device),
        timeout_(timeout),
        communicator_(std::move(communicator)) {}

  // Marks the end of the operation on `stream`. `outputs` is the value of the
  // future; none for coalesced operations, which have no future in c10d either.
  void end_on(const c10::Stream& stream, std::vector<at::Tensor> stash,
              std::optional<std::vector<at::Tensor>> outputs) {
    end_.record(stream);
    stash_ = std::move(stash);
    if (!outputs) return;
    future_ = c10::make_intrusive<Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{device_});
    const c10::StreamGuard guard(stream);
    future_->markCompleted(at::IValue(*outputs));
  }

  bool isCompleted() override { return exception() || end_.query(); }
  bool isSuccess() const override {
    C10_THROW_ERROR(NotImplementedError, "WorkNCCL::isSuccess() is deprecated");
  }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(failure_mutex_);
    return failure_;
  }
  uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  c10::intrusive_ptr<Future> getFutureResult() override { return result_; }
  void synchronize() override { wait(::kNoTimeout); }
  void abort() override { communicator_->abort(""); }

  bool wait(milliseconds timeout) override {
    end_.block(current_stream(device_));
    release();
    if (timeout != ::kNoTimeout || waits_block()) {
      block(timeout == ::kNoTimeout ? timeout_ : timeout);
    } else if (retrieveOpType() == OpType::BARRIER) {
      end_.synchronize();
    }
    if (auto failure = exception()) std::rethrow_exception(failure);
    return true;
  }

  // ---- For the watchdog ----

  bool is_late() const {
    return std::chrono::steady_clock::now() - began_ > timeout_;
  }
  bool has_ended() const { return end_.query(); }
  std::string describe() const {
    return c10::str("WorkNCCL(SeqNum=", number_,
                    ", OpType=", opTypeToString(opType_),
                    ", Timeout(ms)=", timeout_.count(), ")");
  }
  void fail(const std::string& why) {
    {
      const std::lock_guard lock(failure_mutex_);
      if (failure_) return;
      failure_ =
          std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, why));
    }
    complete(WorkResult::COMM_ERROR);
  }
  void succeed() {
    release();
    complete(WorkResult::SUCCESS);
  }

 private:
  void release() {
    std::vector<at::Tensor> stash;
    const std::lock_guard lock(failure_mutex_);
    stash.swap(stash_);
  }
  void complete(WorkResult result) {
    if (!result_->completed()) {
      result_->markCompleted(at::IValue(static_cast<int64_t>(result)));
    }
  }
  void block(milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (!isCompleted()) {
      if (std::chrono::steady_clock::now() >= end) {
        const auto why = c10::str("Work ", describe(),
                                  " timed out in blocking "
                                  "wait after ",
                                  time.count(), " ms.");
        fail(why);
        communicator_->abort(why);
        return;
      }
      std::this_thread::sleep_for(kBlockingSleep);
    }
  }

  const uint64_t number_;
  const c10::Device device_;
  const milliseconds timeout_;
  const std::chrono::steady_clock::time_point began_ =
      std::chrono::steady_clock::now();
  const std::shared_ptr<ProcessGroupNCCL::Communicator> communicator_;
  c10::Event end_{c10::DeviceType::CUDA};
  c10::intrusive_ptr<Future> future_{};
  const c10::intrusive_ptr<Future> result_ =
      c10::make_intrusive<Future>(c10::IntType::get());
  mutable std::mutex failure_mutex_;
  std::exception_ptr failure_{};
  std::vector<at::Tensor> stash_{};
};

using WorkInProgress = c10::intrusive_ptr<SimulatedNcclWork>;

class ProcessGroupNCCL::Watchdog {
 public:
  Watchdog(int rank, std::shared_ptr<Communicator> communicator)
      : rank_(rank),
        communicator_(std::move(communicator)),
        thread_([this](const std::stop_token& stop) { watch(stop); }) {}

  void add(WorkInProgress work) {
    const std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
  }

  std::list<WorkInProgress> pending() const {
    const std::lock_guard lock(mutex_);
    return works_;
  }

 private:
  void watch(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(kWatchdogSleep);
      const auto failure = look();
      if (failure.empty() || error_handling() == 0 || waits_block()) continue;
      communicator_->abort(failure);
      if (!ends_process()) return;
      std::cerr << failure
                << "\nTo avoid data inconsistency, we are taking the entire "
                   "process down.\n";
      std::abort();
    }
  }

  // Returns why the communicator has failed; empty if it has not.
  std::string look() {
    std::string failure = communicator_->reason().value_or("");
    std::list<WorkInProgress> ended;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& work : works_) {
        if (!failure.empty() || !work->is_late() || work->has_ended()) continue;
        failure = c10::str("[Rank ", rank_,
                           "] Watchdog caught collective operation timeout: ",
                           work->describe(), " ran for too long.");
      }
      for (const auto& work : works_) {
        if (!failure.empty() && !work->has_ended()) work->fail(failure);
      }
      const auto first_ended = std::stable_partition(
          works_.begin(), works_.end(),
          [](const auto& work) { return !work->isCompleted(); });
      ended.splice(ended.end(), works_, first_ended, works_.end());
    }
    for (const auto& work : ended) {
      if (!work->exception()) work->succeed();
    }
    return failure;
  }

  const int rank_;
  const std::shared_ptr<Communicator> communicator_;
  mutable std::mutex mutex_;
  std::list<WorkInProgress> works_{};
  std::jthread thread_;  // the last member, as it uses the others
};

ProcessGroupNCCL::ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank,
                                   int size,
                                   c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)) {}

ProcessGroupNCCL::~ProcessGroupNCCL() { abort(); }

void ProcessGroupNCCL::eagerConnectSingleDevice(at::Device device) {
  stream_ =
      c10::impl::VirtualGuardImpl(device.type())
          .getStreamFromGlobalPool(device, options_->is_high_priority_stream);
  auto store = c10::make_intrusive<PrefixStore>("simulated_nccl/", store_);
  const auto key = [](int rank) { return "device/" + std::to_string(rank); };
  const auto own = std::to_string(physical_index(device.index()));
  store->set(key(getRank()), std::vector<uint8_t>(own.begin(), own.end()));
  for (int rank = 0; rank < getSize(); ++rank) {
    if (rank == getRank()) continue;
    store->wait({key(rank)}, kForever);
    const auto value = store->get(key(rank));
    TORCH_CHECK_WITH(
        DistBackendError, std::string(value.begin(), value.end()) != own,
        "NCCL error: ncclInvalidUsage: Duplicate GPU detected : "
        "rank ",
        getRank(), " and rank ", rank, " both on CUDA device ", own);
  }
  communicator_ =
      std::make_shared<Communicator>(lockstep::internal::shm::create(
          {.store = store,
           .rank = getRank(),
           .size = getSize(),
           .timeout = kForever,
           .group_name = options_->group_name,
           .global_ranks = {options_->global_ranks_in_group.begin(),
                            options_->global_ranks_in_group.end()}}));
  watchdog_ = std::make_unique<Watchdog>(getRank(), communicator_);
}

void ProcessGroupNCCL::require_usable() const {
  TORCH_CHECK_WITH(DistBackendError, communicator_ != nullptr,
                   "NCCL communicator is not connected");
  if (const auto reason = communicator_->reason()) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str("NCCL communicator was aborted on rank ", getRank(), ". ",
                 reason->empty()
                     ? ""
                     : "Original reason for failure was: " + *reason));
  }
}

void ProcessGroupNCCL::require_tensors(const Tensors& tensors) const {
  for (const auto& tensor : tensors) {
    if (!tensor.is_cuda() || tensor.layout() != at::kStrided) {
      C10_THROW_ERROR(ValueError, "Tensors must be CUDA and dense");
    }
    if (!tensor.is_contiguous(tensor.suggest_memory_format())) {
      C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
    }
    TORCH_CHECK(tensor.device() == *getBoundDeviceId(),
                "Tensor found on device ", tensor.device(),
                " but backend constrained to ", *getBoundDeviceId());
    TORCH_CHECK_TYPE(nccl_knows(tensor.scalar_type()),
                     "Input tensor data type is not supported for NCCL "
                     "process group: ",
                     tensor.scalar_type());
  }
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::enqueue(
    OpType type, const Tensors& tensors, Tensors outputs, milliseconds timeout,
    bool async_op, const std::function<OnHost()>& prepare) {
  require_usable();
  require_tensors(tensors);
  auto on_host = prepare();
  const auto device = *getBoundDeviceId();
  const auto current = current_stream(device);
  if (async_op || coalescing_) {
    c10::Event ready(device.type());
    ready.record(current);
    ready.block(*stream_);
  }
  if (coalescing_) {
    if (on_host) coalesced_.push_back(std::move(on_host));
    coalesced_tensors_ = joined(std::move(coalesced_tensors_), tensors);
    return c10::make_intrusive<SimulatedNcclWork>(
        getRank(), type, begun_, device, options_->timeout, communicator_);
  }
  ++begun_;
  const auto stream = async_op ? *stream_ : current;
  auto work = c10::make_intrusive<SimulatedNcclWork>(
      getRank(), type, begun_, device,
      timeout == kUnsetTimeout ? options_->timeout : timeout, communicator_);
  if (last_) last_->block(stream);
  lockstep::internal::simulated_cuda::enqueue(
      stream, [communicator = communicator_, run = std::move(on_host)] {
        communicator->run(run);
      });
  last_.emplace(device.type()).record(stream);
  work->end_on(stream, async_op ? tensors : Tensors{}, std::move(outputs));
  watchdog_->add(work);
  return work;
}

void ProcessGroupNCCL::startCoalescing() { coalescing_ = true; }

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::endCoalescing() {
  coalescing_ = false;
  auto messages = std::exchange(coalesced_messages_, {});
  auto operations = std::exchange(coalesced_, {});
  auto tensors = std::exchange(coalesced_tensors_, {});
  if (messages.empty() && operations.empty()) return nullptr;
  require_usable();
  auto work = c10::make_intrusive<SimulatedNcclWork>(
      getRank(), OpType::COALESCED, ++begun_, *getBoundDeviceId(),
      options_->timeout, communicator_);
  if (last_) last_->block(*stream_);
  lockstep::internal::simulated_cuda::enqueue(
      *stream_, [communicator = communicator_, messages = std::move(messages),
                 operations = std::move(operations)] {
        communicator->run([&](Backend& transport) {
          for (const auto& operation : operations) operation(transport);
          exchange(transport, messages);
        });
      });
  last_.emplace(stream_->device_type()).record(*stream_);
  work->end_on(*stream_, std::move(tensors), std::nullopt);
  watchdog_->add(work);
  return work;
}

void ProcessGroupNCCL::exchange(Backend& transport,
                                std::vector<Message> messages) {
  constexpr int kData = 0;
  constexpr int kReceived = 1;
  std::vector<WorkPtr> data;
  std::vector<WorkPtr> ends;
  std::vector<Tensors> receipts;  // which must live until their messages end
  for (auto& [sends, peer, memory] : messages) {
    Tensors payload{memory};
    receipts.push_back({at::zeros({1}, at::kByte)});
    if (sends) {
      data.push_back(transport.send(payload, peer, kData));
      ends.push_back(transport.recv(receipts.back(), peer, kReceived));
    } else {
      data.push_back(transport.recv(payload, peer, kData));
    }
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    data[i]->wait(kForever);
    if (messages[i].sends) continue;
    transport.send(receipts[i], messages[i].peer, kReceived)->wait(kForever);
  }
  for (const auto& end : ends) end->wait(kForever);
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::message(OpType type,
                                                    at::Tensor tensor,
                                                    int peer) {
  return enqueue(type, {tensor}, {tensor}, kUnsetTimeout, /*async_op=*/true,
                 [&]() -> OnHost {
                   const Message message{.sends = type == OpType::SEND,
                                         .peer = peer,
                                         .memory = memory_of(tensor)};
                   if (coalescing_) {
                     coalesced_messages_.push_back(message);
                     return nullptr;
                   }
                   return [message](Backend& transport) {
                     exchange(transport, {message});
                   };
                 });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::send(Tensors& tensors, int to,
                                                 int /*tag*/) {
  return message(OpType::SEND, tensors.at(0), to);
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::recv(Tensors& tensors, int from,
                                                 int /*tag*/) {
  return message(OpType::RECV, tensors.at(0), from);
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::broadcast(
    Tensors& tensors, const BroadcastOptions& options) {
  return enqueue(
      OpType::BROADCAST, tensors, tensors, options.timeout, options.asyncOp,
      [&]() -> OnHost {
        return [memory = memory_of_all(tensors),
                options = of_transport(options)](Backend& transport) mutable {
          transport.broadcast(memory, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::allreduce(
    Tensors& tensors, const AllreduceOptions& options) {
  require_known(options.reduceOp, tensors.at(0).scalar_type());
  return enqueue(
      OpType::ALLREDUCE, tensors, tensors, options.timeout, options.asyncOp,
      [&]() -> OnHost {
        return [memory = memory_of_all(tensors),
                options = of_transport(options)](Backend& transport) mutable {
          transport.allreduce(memory, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::allreduce_coalesced(
    Tensors& tensors, const AllreduceCoalescedOptions& options) {
  require_known(options.reduceOp, tensors.at(0).scalar_type());
  return enqueue(
      OpType::ALLREDUCE_COALESCED, tensors, tensors, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [memory = memory_of_all(tensors),
                options = of_transport(options)](Backend& transport) mutable {
          transport.allreduce_coalesced(memory, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::reduce(
    Tensors& tensors, const ReduceOptions& options) {
  require_known(options.reduceOp, tensors.at(0).scalar_type());
  return enqueue(
      OpType::REDUCE, tensors, tensors, options.timeout, options.asyncOp,
      [&]() -> OnHost {
        return [memory = memory_of_all(tensors),
                options = of_transport(options)](Backend& transport) mutable {
          transport.reduce(memory, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::allgather(
    TensorLists& outputs, Tensors& inputs, const AllgatherOptions& options) {
  return enqueue(
      OpType::ALLGATHER, joined(inputs, outputs.at(0)), outputs.at(0),
      options.timeout, options.asyncOp, [&]() -> OnHost {
        return [from = memory_of_all(inputs), to = memory_of_lists(outputs),
                options = of_transport(options)](Backend& transport) mutable {
          transport.allgather(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::_allgather_base(
    at::Tensor& output, at::Tensor& input, const AllgatherOptions& options) {
  return enqueue(
      OpType::_ALLGATHER_BASE, {input, output}, {output}, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of(input), to = memory_of(output),
                options = of_transport(options)](Backend& transport) mutable {
          transport._allgather_base(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) {
  return enqueue(
      OpType::COALESCED, joined(inputs, outputs), outputs, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of_all(inputs), to = memory_of_all(outputs),
                options = of_transport(options)](Backend& transport) mutable {
          transport.allgather_into_tensor_coalesced(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::reduce_scatter(
    Tensors& outputs, TensorLists& inputs,
    const ReduceScatterOptions& options) {
  require_known(options.reduceOp, outputs.at(0).scalar_type());
  return enqueue(
      OpType::REDUCE_SCATTER, joined(outputs, inputs.at(0)), outputs,
      options.timeout, options.asyncOp, [&]() -> OnHost {
        return [from = memory_of_lists(inputs), to = memory_of_all(outputs),
                options = of_transport(options)](Backend& transport) mutable {
          transport.reduce_scatter(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const ReduceScatterOptions& options) {
  require_known(options.reduceOp, output.scalar_type());
  return enqueue(
      OpType::_REDUCE_SCATTER_BASE, {input, output}, {output}, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of(input), to = memory_of(output),
                options = of_transport(options)](Backend& transport) mutable {
          transport._reduce_scatter_base(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) {
  require_known(options.reduceOp, outputs.at(0).scalar_type());
  return enqueue(
      OpType::COALESCED, joined(inputs, outputs), outputs, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of_all(inputs), to = memory_of_all(outputs),
                options = of_transport(options)](Backend& transport) mutable {
          transport.reduce_scatter_tensor_coalesced(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const AllToAllOptions& options) {
  return enqueue(
      OpType::ALLTOALL_BASE, {input, output}, {output}, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of(input), to = memory_of(output), output_splits,
                input_splits,
                options = of_transport(options)](Backend& transport) mutable {
          transport
              .alltoall_base(to, from, output_splits, input_splits, options)
              ->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::alltoall(
    Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) {
  return enqueue(
      OpType::ALLTOALL, joined(inputs, outputs), outputs, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of_all(inputs), to = memory_of_all(outputs),
                options = of_transport(options)](Backend& transport) mutable {
          transport.alltoall(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::gather(
    TensorLists& outputs, Tensors& inputs, const GatherOptions& options) {
  const Tensors list = outputs.empty() ? Tensors{} : outputs.at(0);
  return enqueue(
      OpType::GATHER, joined(inputs, list), list, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of_all(inputs), to = memory_of_lists(outputs),
                options = of_transport(options)](Backend& transport) mutable {
          transport.gather(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::scatter(
    Tensors& outputs, TensorLists& inputs, const ScatterOptions& options) {
  const Tensors list = inputs.empty() ? Tensors{} : inputs.at(0);
  return enqueue(
      OpType::SCATTER, joined(outputs, list), outputs, options.timeout,
      options.asyncOp, [&]() -> OnHost {
        return [from = memory_of_lists(inputs), to = memory_of_all(outputs),
                options = of_transport(options)](Backend& transport) mutable {
          transport.scatter(to, from, options)->wait();
        };
      });
}

ProcessGroupNCCL::WorkPtr ProcessGroupNCCL::barrier(
    const BarrierOptions& options) {
  // As in c10d, the operation is an allreduce of one number, which the host
  // waits for.
  Tensors number{at::zeros({1}, at::TensorOptions(*getBoundDeviceId()))};
  return enqueue(
      OpType::BARRIER, number, number, options.timeout, options.asyncOp,
      [&]() -> OnHost {
        return [memory = memory_of_all(number)](Backend& transport) mutable {
          transport.allreduce(memory, of_transport(AllreduceOptions()))->wait();
        };
      });
}

void ProcessGroupNCCL::abortComms(const std::optional<std::string>& reason) {
  if (communicator_) communicator_->abort(reason.value_or(""));
}

void ProcessGroupNCCL::abort() {
  if (!communicator_) return;
  watchdog_.reset();
  communicator_->abort("");
}

void ProcessGroupNCCL::shutdown() {
  if (!communicator_) return;
  for (const auto& work : watchdog_->pending()) {
    while (!work->isCompleted()) std::this_thread::sleep_for(kBlockingSleep);
  }
  abort();
}

}  // namespace c10d

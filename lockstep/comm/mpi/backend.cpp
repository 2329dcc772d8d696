#include "lockstep/comm/mpi/backend.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <type_traits>

#include "lockstep/comm/errors.h"
#include "lockstep/comm/mpi/operations.h"

namespace lockstep::internal::mpi {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;

void require(bool right, const std::string& what) {
  if (!right) throw std::invalid_argument("mpi: " + what);
}

void require_tensor(const at::Tensor& tensor) {
  require(tensor.device().is_cpu(),
          c10::str("a tensor is on ", tensor.device(), "; allowed is the CPU"));
  require(tensor.layout() == c10::kStrided && tensor.is_contiguous(),
          "a tensor is not contiguous; give tensor.contiguous()");
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
  require(
      tensors.size() == 1,
      c10::str("the list must hold one tensor, but holds ", tensors.size()));
  require_tensor(tensors[0]);
  return tensors[0];
}

// Returns the list of one tensor for each rank if `here`, otherwise none.
std::vector<at::Tensor> list_of(const std::vector<std::vector<at::Tensor>>& all,
                                int size, bool here = true) {
  if (!here) return {};
  require(all.size() == 1 && all[0].size() == static_cast<size_t>(size),
          c10::str("give one list of ", size, " tensors, one for each rank"));
  for (const auto& tensor : all[0]) require_tensor(tensor);
  return all[0];
}

// Converts split sizes of the first dimension to elements; none means equal
// parts.
std::vector<int64_t> elements(const std::vector<int64_t>& splits,
                              const at::Tensor& tensor, int size) {
  if (splits.empty()) {
    require(tensor.numel() % size == 0,
            c10::str(tensor.numel(), " elements cannot be divided among ", size,
                     " ranks; give split sizes"));
    return std::vector<int64_t>(size, tensor.numel() / size);
  }
  const auto rows = tensor.size(0);
  const auto row = rows > 0 ? tensor.numel() / rows : 0;
  std::vector<int64_t> counts;
  int64_t sum = 0;
  for (const auto split : splits) {
    counts.push_back(split * row);
    sum += split;
  }
  require(splits.size() == static_cast<size_t>(size) && sum == rows,
          c10::str("split sizes are ", splits, "; they must be ", size,
                   " numbers that add up to ", rows));
  return counts;
}

}  // namespace

Backend::Backend(std::shared_ptr<Communicator> communicator,
                 milliseconds timeout)
    : c10d::Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      timeout_(timeout) {}

void Backend::break_off(const std::string& reason) {
  {
    std::lock_guard lock(reason_mutex_);
    if (!reason_.empty()) return;
    reason_ = reason;
  }
  never_finalize();
  communicator_->abandon();
  queue_.close(std::make_exception_ptr(c10::DistBackendError(reason)));
}

void Backend::abort() { break_off("this rank has left the group"); }

void Backend::break_by(const std::exception& error) {
  break_off("the group is broken, because an earlier operation failed (" +
            words_of(error) + ")");
}

template <typename Body>
void Backend::perform(const Deadline& deadline, const Body& body) {
  Round round(*communicator_, deadline);
  try {
    body(round);
  } catch (const std::exception& error) {
    round.leak_memory();
    break_by(error);
    throw;
  }
}

template <typename CallOptions, typename Body>
Backend::WorkPtr Backend::issue(OpType type, const CallOptions& opts,
                                Tensors results, Body body) {
  const auto timeout = opts.timeout > milliseconds(0) ? opts.timeout : timeout_;
  const auto deadline = Deadline::after(timeout);
  if (!opts.asyncOp) {
    bool begun = false;
    try {
      queue_.run(timeout, [&] {
        begun = true;
        perform(deadline, body);
      });
    } catch (const std::exception& error) {
      // The peers make a call in which this rank does not take part.
      if (!begun) break_by(error);
      throw;
    }
    return completed_work();
  }
  return queue_.enqueue(
      getRank(), type, timeout, std::move(results),
      [this, deadline, body = std::move(body)] { perform(deadline, body); });
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors,
                                    const c10d::AllreduceOptions& opts) {
  require(tensors.size() == 1, "the list must hold one tensor");
  const auto& tensor = tensors[0];
  if (tensor.is_sparse()) {
    require(opts.reduceOp == c10d::ReduceOp::SUM,
            "sparse tensors can only be reduced with SUM");
    return issue(OpType::_ALLREDUCE_SPARSE, opts, {tensor},
                 [=](Round& round) { all_reduce_sparse(round, tensor); });
  }
  require_tensor(tensor);
  return issue(
      OpType::ALLREDUCE, opts, {tensor},
      [=, op = opts.reduceOp](Round& round) { all_reduce(round, tensor, op); });
}

Backend::WorkPtr Backend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  require(!tensors.empty(), "the list of tensors is empty");
  for (const auto& tensor : tensors) {
    require_tensor(tensor);
    require(tensor.scalar_type() == tensors[0].scalar_type(),
            "the tensors of a list must have one dtype");
  }
  return issue(OpType::ALLREDUCE_COALESCED, opts, tensors,
               [list = tensors, op = opts.reduceOp](Round& round) {
                 all_reduce_coalesced(round, list, op);
               });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors,
                                 const c10d::ReduceOptions& opts) {
  return issue(OpType::REDUCE, opts, tensors,
               [tensor = only(tensors), root = static_cast<int>(opts.rootRank),
                op = opts.reduceOp](Round& round) {
                 mpi::reduce(round, tensor, root, op);
               });
}

Backend::WorkPtr Backend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return issue(OpType::REDUCE_SCATTER, opts, outputs,
               [output = only(outputs), list = list_of(inputs, getSize()),
                op = opts.reduceOp](Round& round) {
                 mpi::reduce_scatter(round, output, list, op);
               });
}

Backend::WorkPtr Backend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  require_tensor(output);
  require_tensor(input);
  return issue(OpType::_REDUCE_SCATTER_BASE, opts, {output},
               [output, input, op = opts.reduceOp](Round& round) {
                 mpi::reduce_scatter(round, output, input, op);
               });
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors,
                                    const c10d::BroadcastOptions& opts) {
  return issue(OpType::BROADCAST, opts, tensors,
               [tensor = only(tensors), root = static_cast<int>(opts.rootRank)](
                   Round& round) { mpi::broadcast(round, tensor, root); });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs,
                                    Tensors& inputs,
                                    const c10d::AllgatherOptions& opts) {
  auto list = list_of(outputs, getSize());
  return issue(OpType::ALLGATHER, opts, list,
               [list, input = only(inputs)](Round& round) {
                 all_gather(round, list, input);
               });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& opts) {
  require_tensor(output);
  require_tensor(input);
  return issue(
      OpType::_ALLGATHER_BASE, opts, {output},
      [output, input](Round& round) { all_gather(round, output, input); });
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  auto list = list_of(outputs, getSize(), root == getRank());
  return issue(OpType::GATHER, opts, list,
               [list, input = only(inputs), root](Round& round) {
                 mpi::gather(round, list, input, root);
               });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs,
                                  std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  return issue(OpType::SCATTER, opts, outputs,
               [output = only(outputs),
                list = list_of(inputs, getSize(), root == getRank()), root](
                   Round& round) { mpi::scatter(round, output, list, root); });
}

Backend::WorkPtr Backend::alltoall_base(
    at::Tensor& output, at::Tensor& input,
    std::vector<int64_t>& output_split_sizes,
    std::vector<int64_t>& input_split_sizes,
    const c10d::AllToAllOptions& opts) {
  require_tensor(output);
  require_tensor(input);
  return issue(
      OpType::ALLTOALL_BASE, opts, {output},
      [output, input,
       receives = elements(output_split_sizes, output, getSize()),
       sends = elements(input_split_sizes, input, getSize())](Round& round) {
        all_to_all(round, output, input, receives, sends);
      });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  return issue(OpType::BARRIER, opts, {},
               [](Round& round) { mpi::barrier(round); });
}

void Backend::require_whole() {
  std::lock_guard lock(reason_mutex_);
  if (reason_.empty()) return;
  throw c10::DistBackendError(reason_);
}

Backend::WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  require_whole();
  return start_send(communicator_, only(tensors), to, tag, timeout_);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  require_whole();
  return start_recv(communicator_, only(tensors), from, tag, timeout_);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  require_whole();
  return start_recv(communicator_, only(tensors), MPI_ANY_SOURCE, tag,
                    timeout_);
}

}  // namespace lockstep::internal::mpi

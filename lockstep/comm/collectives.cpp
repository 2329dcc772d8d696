#include "lockstep/comm/collectives.h"

#include <stdexcept>

#include <c10/util/Exception.h>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/init.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// One operation as its errors describe it.
struct Call {
  const char* operation;
  ProcessGroupPtr group;
  milliseconds timeout;

  Call(const char* name, const ProcessGroupPtr& given, milliseconds allowed)
      : operation(name),
        group(given ? given : default_group()),
        timeout(allowed > milliseconds(0) ? allowed : group->timeout()) {}

  std::string where() const {
    return std::string(operation) + " in group '" + group->name() +
           "' on rank " + std::to_string(group->rank()) + " of " +
           std::to_string(group->size());
  }

  [[noreturn]] void fail(const Deadline& started, const char* cause) const {
    throw c10::DistBackendError(
        {operation, __FILE__, __LINE__},
        c10::str(where(), " failed after ", started.elapsed().count(),
                 " ms (allowed ", timeout.count(), " ms): ", cause));
  }
};

// Gives the errors of a c10d work the words of Call.
class CheckedWork final : public Work {
 public:
  CheckedWork(Call call, WorkPtr work)
      : Work(call.group->rank(), work->retrieveOpType()),
        call_(std::move(call)),
        started_(Deadline::after(call_.timeout)),
        work_(std::move(work)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return work_->getFuture();
  }
  uint64_t getSequencenumber() const override {
    return work_->getSequencenumber();
  }

  bool wait(milliseconds timeout) override {
    try {
      return work_->wait(timeout == ::kNoTimeout ? call_.timeout : timeout);
    } catch (const c10::Error& error) {
      call_.fail(started_, error.what_without_backtrace());
    } catch (const std::exception& error) {
      call_.fail(started_, error.what());
    }
  }

 private:
  Call call_;
  Deadline started_;
  WorkPtr work_;
};

// Starts the operation and, unless it is asynchronous, waits for its end.
template <typename Start>
WorkPtr run(Call call, bool async_op, Start&& start) {
  Deadline started = Deadline::after(call.timeout);
  WorkPtr work;
  try {
    work = start();
    if (!async_op) work->wait(call.timeout);
  } catch (const c10::Error& error) {
    call.fail(started, error.what_without_backtrace());
  } catch (const std::exception& error) {
    call.fail(started, error.what());
  }
  if (!async_op) return nullptr;
  return c10::make_intrusive<CheckedWork>(std::move(call), std::move(work));
}

void require_usable(const Call& call, const at::Tensor& tensor, bool async_op) {
  if (!tensor.defined()) {
    throw std::invalid_argument(call.where() + ": the tensor is undefined");
  }
  if (tensor.layout() != c10::kStrided) {
    throw std::invalid_argument(call.where() +
                                ": the tensor is sparse; give a dense one");
  }
  if (async_op && !tensor.is_contiguous()) {
    throw std::invalid_argument(
        call.where() +
        ": an asynchronous operation needs a contiguous tensor "
        "(strides are " +
        c10::str(tensor.strides()) + "); give tensor.contiguous()");
  }
}

// What the backend works on: `tensor`, or a contiguous copy of it that
// finish() writes back. Detached, so that a leaf that requires grad will do.
struct Buffer {
  explicit Buffer(const at::Tensor& tensor)
      : target(tensor.detach()), buffer{target.contiguous()} {}
  void finish() const {
    if (!buffer[0].is_same(target)) target.copy_(buffer[0]);
  }
  at::Tensor target;
  std::vector<at::Tensor> buffer;
};

// Gloo has no AVG; dividing first is what DistributedDataParallel does too.
c10d::ReduceOp lower_average(const Call& call, const at::Tensor& tensor,
                             const c10d::ReduceOp& op) {
  if (op != c10d::ReduceOp::AVG) return op;
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    throw std::invalid_argument(
        call.where() + ": AVG is for floating-point tensors, this one is " +
        c10::str(tensor.scalar_type()) + "; use SUM and divide");
  }
  return c10d::ReduceOp::SUM;
}

}  // namespace

WorkPtr all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  Call call("all_reduce", options.group, options.timeout);
  require_usable(call, tensor, options.async_op);
  auto& backend = call.group->backend(tensor.device().type());
  Buffer in(tensor);
  c10d::AllreduceOptions opts;
  opts.reduceOp = lower_average(call, tensor, options.op);
  opts.timeout = call.timeout;
  opts.asyncOp = options.async_op;
  if (options.op == ReduceOp::AVG) in.buffer[0].div_(call.group->size());
  auto work = run(call, options.async_op,
                  [&] { return backend.allreduce(in.buffer, opts); });
  in.finish();
  return work;
}

WorkPtr reduce(const at::Tensor& tensor, int dst,
               const ReduceOptions& options) {
  Call call("reduce", options.group, options.timeout);
  require_usable(call, tensor, options.async_op);
  auto& backend = call.group->backend(tensor.device().type());
  Buffer in(tensor);
  c10d::ReduceOptions opts;
  opts.reduceOp = lower_average(call, tensor, options.op);
  opts.rootRank = call.group->group_rank(dst);
  opts.timeout = call.timeout;
  opts.asyncOp = options.async_op;
  if (options.op == ReduceOp::AVG) in.buffer[0].div_(call.group->size());
  auto work = run(call, options.async_op,
                  [&] { return backend.reduce(in.buffer, opts); });
  in.finish();
  return work;
}

WorkPtr broadcast(const at::Tensor& tensor, int src,
                  const BroadcastOptions& options) {
  Call call("broadcast", options.group, options.timeout);
  require_usable(call, tensor, options.async_op);
  auto& backend = call.group->backend(tensor.device().type());
  Buffer in(tensor);
  c10d::BroadcastOptions opts;
  opts.rootRank = call.group->group_rank(src);
  opts.timeout = call.timeout;
  opts.asyncOp = options.async_op;
  auto work = run(call, options.async_op,
                  [&] { return backend.broadcast(in.buffer, opts); });
  in.finish();
  return work;
}

WorkPtr all_gather(std::vector<at::Tensor>& tensor_list,
                   const at::Tensor& tensor, const AllGatherOptions& options) {
  Call call("all_gather", options.group, options.timeout);
  require_usable(call, tensor, options.async_op);
  if (static_cast<int>(tensor_list.size()) != call.group->size()) {
    throw std::invalid_argument(call.where() + ": the list holds " +
                                std::to_string(tensor_list.size()) +
                                " tensors; give one a rank (" +
                                std::to_string(call.group->size()) + ")");
  }
  for (const auto& output : tensor_list) {
    require_usable(call, output, options.async_op);
    if (output.sizes() != tensor.sizes() ||
        output.scalar_type() != tensor.scalar_type()) {
      throw std::invalid_argument(c10::str(
          call.where(), ": a tensor of the list is ", output.scalar_type(),
          output.sizes(), ", the one to gather ", tensor.scalar_type(),
          tensor.sizes(), "; give the same shape and dtype"));
    }
  }
  auto& backend = call.group->backend(tensor.device().type());
  Buffer in(tensor);
  std::vector<Buffer> outs(tensor_list.begin(), tensor_list.end());
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (auto& out : outs) outputs[0].push_back(out.buffer[0]);
  c10d::AllgatherOptions opts;
  opts.timeout = call.timeout;
  opts.asyncOp = options.async_op;
  auto work = run(call, options.async_op,
                  [&] { return backend.allgather(outputs, in.buffer, opts); });
  for (auto& out : outs) out.finish();
  return work;
}

WorkPtr barrier(const BarrierOptions& options) {
  Call call("barrier", options.group, options.timeout);
  auto& backend = call.group->backend(call.group->control_device().type());
  c10d::BarrierOptions opts;
  opts.timeout = call.timeout;
  opts.asyncOp = options.async_op;
  return run(call, options.async_op, [&] { return backend.barrier(opts); });
}

}  // namespace lockstep

#include "lockstep/comm/collectives.h"

#include <ATen/ATen.h>

#include <map>
#include <numeric>

#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/collective_work.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/running_call.h"
#include "lockstep/trace/span.h"

namespace lockstep {
namespace {

// `what` is a tensor or a list of tensors.
template <typename Tensors>
std::string agreed(const ReduceOp& op, const Tensors& what) {
  return std::string(internal::op_name(op)) + ", " + internal::describe(what);
}

// The sum of sparse tensors has as many entries as those of all ranks together,
// so the result is not in the memory of the input. Gloo has only SUM, so AVG
// divides here. In shared memory the backend divides, so that it can compare
// the operation that each rank asks for.
WorkPtr all_reduce_sparse(internal::Call call, const at::Tensor& tensor,
                          const ReductionOptions& options) {
  if (tensor.layout() != c10::kSparse) {
    throw call.mistake(c10::str("the tensor's layout is ", tensor.layout(),
                                "; allowed are dense and Sparse (COO)"));
  }
  if (options.op != ReduceOp::SUM && options.op != ReduceOp::AVG) {
    throw call.mistake(c10::str(
        internal::op_name(options.op),
        " of sparse tensors is not supported; allowed are SUM and AVG"));
  }
  if (!internal::known_to_backends(tensor.scalar_type())) {
    throw call.mistake(c10::str("a sparse tensor of ", tensor.scalar_type(),
                                " cannot be reduced; convert its values, or "
                                "give tensor.to_dense()"));
  }
  auto& backend = call.backend(tensor);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> work_on{buffers.sparse(tensor)};
  auto opts =
      internal::backend_options<c10d::AllreduceOptions>(call, options.async_op);
  if (internal::traits_of(backend).takes_lists_at_once()) {
    opts.reduceOp = options.op;
  } else if (options.op == ReduceOp::AVG) {
    work_on[0].div_(call.group->size());
  }
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] {
        return internal::Agreed{c10::str(internal::op_name(options.op),
                                         ", sparse ",
                                         internal::describe(tensor))};
      },
      [&] { return backend.allreduce(work_on, opts); });
}

// Returns the backend's way past options, lists, futures and works, which cost
// more than the reduction of a few numbers. Returns nullptr if the backend has
// none, if the tensor does not suit it, or if something must see the call (a
// comparison of calls, an observer of spans).
internal::DirectReduce* direct_way(const internal::Call& call,
                                   const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided ||
      !tensor.is_contiguous() || tensor.is_neg() || tensor.is_conj() ||
      tensor._is_zerotensor() || !internal::known_to_backends(dtype) ||
      call.group->checks_calls() || internal::Span::observed()) {
    return nullptr;
  }
  return internal::inside(call.group).direct_reduce();
}

void all_reduce_directly(internal::DirectReduce& direct, internal::Call& call,
                         const at::Tensor& tensor, const ReduceOp& op) {
  const auto dtype = tensor.scalar_type();
  const auto count = static_cast<uint64_t>(tensor.numel());
  call.take_numbers();
  internal::RunningCall running(call,
                                {.type = {.code = static_cast<uint8_t>(dtype),
                                          .name = c10::toString(dtype)},
                                 .in = count,
                                 .out = count},
                                internal::FlightState::started,
                                internal::Operation::Spans::none);
  try {
    direct.all_reduce_direct(tensor.mutable_data_ptr(), tensor.numel(), dtype,
                             op, call.timeout);
  } catch (const std::exception& error) {
    running.fail(error);
  }
  running.succeed();
}

}  // namespace

WorkPtr all_reduce(const at::Tensor& tensor, const ReductionOptions& options) {
  internal::Call call("all_reduce", options.group, options.timeout);
  if (!tensor.defined()) throw call.mistake("the tensor is undefined");
  internal::require_reducible(call, options.op, tensor.scalar_type());
  if (!options.async_op) {
    if (auto* direct = direct_way(call, tensor)) {
      all_reduce_directly(*direct, call, tensor, options.op);
      return nullptr;
    }
  }
  if (tensor.layout() != c10::kStrided) {
    return all_reduce_sparse(std::move(call), tensor, options);
  }
  internal::require_dense(call, "the tensor", tensor);
  auto& backend = call.backend(tensor);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> work_on{buffers.reduce(tensor)};
  auto opts = internal::backend_options<c10d::AllreduceOptions>(call, options);
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] { return internal::Agreed{agreed(options.op, tensor)}; },
      [&] { return backend.allreduce(work_on, opts); });
}

WorkPtr all_reduce_coalesced(at::TensorList tensors,
                             const ReductionOptions& options) {
  internal::Call call("all_reduce_coalesced", options.group, options.timeout);
  if (tensors.empty()) {
    throw call.mistake("the list is empty; give at least one tensor");
  }
  for (const auto& tensor : tensors) {
    internal::require_dense(call, "a tensor of the list", tensor);
    internal::require_reducible(call, options.op, tensor.scalar_type());
    if (tensor.device() != tensors[0].device()) {
      throw call.mistake(c10::str("the list holds tensors of ",
                                  tensors[0].device(), " and ", tensor.device(),
                                  "; give tensors of one device"));
    }
  }
  auto& backend = call.backend(tensors[0]);
  internal::Buffers buffers(call);
  // In shared memory all dtypes go into one call, so that a failure ends it on
  // all ranks at the same tensor.
  const bool mixed = internal::traits_of(backend).takes_lists_at_once();
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const auto& tensor : tensors) {
    auto work_on = buffers.reduce(tensor);
    // One entry for all if dtypes may be mixed.
    by_dtype[mixed ? at::kFloat : work_on.scalar_type()].push_back(work_on);
  }
  call.parts = static_cast<uint16_t>(tensors.size());
  auto opts =
      internal::backend_options<c10d::AllreduceCoalescedOptions>(call, options);
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] { return internal::Agreed{agreed(options.op, tensors)}; },
      [&] {
        std::vector<WorkPtr> works;
        for (auto& [dtype, list] : by_dtype) {
          works.push_back(backend.allreduce_coalesced(list, opts));
        }
        return internal::join_works(std::move(works));
      });
}

WorkPtr reduce(const at::Tensor& tensor, int dst,
               const ReductionOptions& options) {
  internal::Call call("reduce", options.group, options.timeout);
  internal::require_dense(call, "the tensor", tensor);
  internal::require_reducible(call, options.op, tensor.scalar_type());
  auto& backend = call.backend(tensor);
  auto opts = internal::backend_options<c10d::ReduceOptions>(call, options);
  opts.rootRank = call.member("dst", dst);
  const bool reads_only =
      opts.rootRank != call.group->rank() && tensor._is_zerotensor();
  internal::Buffers buffers(call);
  std::vector<at::Tensor> work_on{reads_only ? buffers.reduce_input(tensor)
                                             : buffers.reduce(tensor)};
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] {
        return internal::Agreed{
            c10::str(agreed(options.op, tensor), ", dst ", dst)};
      },
      [&] { return backend.reduce(work_on, opts); });
}

WorkPtr reduce_scatter(const at::Tensor& output, at::TensorList input_list,
                       const ReductionOptions& options) {
  internal::Call call("reduce_scatter", options.group, options.timeout);
  internal::require_dense(call, "output", output);
  internal::require_reducible(call, options.op, output.scalar_type());
  internal::require_list(call, "input_list", input_list, output);
  const int own = call.group->rank();
  internal::require_shape(call, "output", output, input_list[own]);
  auto& backend = call.backend(output);
  internal::Buffers buffers(call);
  std::vector<std::vector<at::Tensor>> inputs(1);
  for (const auto& input : input_list) {
    inputs[0].push_back(buffers.reduce_input(input));
  }
  // The result gets memory of its own: the output may be one of the inputs.
  std::vector<at::Tensor> outputs{at::empty_like(inputs[0][own])};
  buffers.write_from(outputs[0], output);
  auto opts =
      internal::backend_options<c10d::ReduceScatterOptions>(call, options);
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] { return internal::Agreed{agreed(options.op, input_list)}; },
      [&] { return backend.reduce_scatter(outputs, inputs, opts); });
}

WorkPtr reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReductionOptions& options) {
  internal::Call call("reduce_scatter_tensor", options.group, options.timeout);
  internal::require_dense(call, "output", output);
  internal::require_dense(call, "input", input);
  internal::require_reducible(call, options.op, output.scalar_type());
  if (input.scalar_type() != output.scalar_type() ||
      input.device() != output.device()) {
    throw call.mistake(c10::str("input is ", input.scalar_type(), " on ",
                                input.device(), ", output ",
                                output.scalar_type(), " on ", output.device(),
                                "; give one dtype and device"));
  }
  if (input.numel() != output.numel() * call.group->size()) {
    throw call.mistake(c10::str("input has ", input.numel(),
                                " elements; it must have those of output, ",
                                output.numel(), ", for each of ",
                                call.group->size(), " ranks"));
  }
  auto& backend = call.backend(output);
  internal::Buffers buffers(call);
  auto in = buffers.reduce_input(input);
  auto out = at::empty({in.numel() / call.group->size()}, in.options());
  buffers.write_from(out, output);
  auto opts =
      internal::backend_options<c10d::ReduceScatterOptions>(call, options);
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] { return internal::Agreed{agreed(options.op, output)}; },
      [&] { return backend._reduce_scatter_base(out, in, opts); });
}

}  // namespace lockstep

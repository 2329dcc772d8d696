#include "lockstep/comm/collectives.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/collective_work.h"

namespace lockstep {
namespace {

using Use = internal::Buffers::Use;

void require_like(const internal::Call& call, const char* argument,
                  const at::Tensor& tensor, const char* other,
                  const at::Tensor& like) {
  if (tensor.scalar_type() == like.scalar_type() &&
      tensor.device() == like.device()) {
    return;
  }
  throw call.mistake(c10::str(argument, " is ", tensor.scalar_type(), " on ",
                              tensor.device(), ", ", other, " ",
                              like.scalar_type(), " on ", like.device(),
                              "; give one dtype and device"));
}

bool is_empty_elsewhere(const internal::Call& call, const char* argument,
                        int root, at::TensorList list) {
  const bool here = call.group->rank() == root;
  if (!here && !list.empty()) {
    throw call.mistake(c10::str(
        argument, " holds ", list.size(), " tensors, but this is not rank ",
        call.group->global_rank(root), "; give none on the other ranks"));
  }
  return !here;
}

// Throws if this rank sends another number of elements to itself than it
// expects from itself, and the backend does not compare sizes between ranks.
// (One that does makes all ranks throw; here only this rank throws, and its
// peers wait for it.)
void require_own_part(const internal::Call& call, const c10d::Backend& backend,
                      const std::vector<int64_t>& sends,
                      const std::vector<int64_t>& receives) {
  const bool compared = internal::traits_of(backend).takes_lists_at_once();
  if (compared || call.group->checks_calls()) return;
  const int own = call.group->rank();
  if (sends[own] == receives[own]) return;
  throw call.mistake(c10::str("rank ", call.group->global_rank(own), " sends ",
                              sends[own], " elements to itself, but expects ",
                              receives[own],
                              " from itself; both must be equal"));
}

// Gathers by one broadcast for each rank, because the shapes differ.
WorkPtr all_gather_uneven(internal::Call call, at::TensorList tensor_list,
                          const at::Tensor& tensor, bool async_op) {
  auto& backend = call.backend(tensor);
  auto opts = internal::backend_options<c10d::BroadcastOptions>(call, async_op);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> lanes;
  for (const auto& output : tensor_list) {
    lanes.push_back(buffers.move(output, Use::write));
  }
  const auto own = buffers.move(tensor, Use::read);
  const int own_rank = call.group->rank();
  call.parts = static_cast<uint16_t>(lanes.size());
  return internal::run_collective(
      std::move(call), async_op, std::move(buffers),
      [&] { return internal::Agreed{internal::describe(tensor_list)}; },
      [&] {
        lanes[own_rank].copy_(own);
        std::vector<WorkPtr> works;
        for (size_t root = 0; root < lanes.size(); ++root) {
          opts.rootRank = static_cast<int64_t>(root);
          std::vector<at::Tensor> lane{lanes[root]};
          works.push_back(backend.broadcast(lane, opts));
        }
        return internal::join_works(std::move(works));
      });
}

}  // namespace

WorkPtr broadcast(const at::Tensor& tensor, int src,
                  const CollectiveOptions& options) {
  internal::Call call("broadcast", options.group, options.timeout);
  internal::require_dense(call, "the tensor", tensor);
  auto& backend = call.backend(tensor);
  auto opts =
      internal::backend_options<c10d::BroadcastOptions>(call, options.async_op);
  opts.rootRank = call.member("src", src);
  const bool sends = opts.rootRank == call.group->rank();
  internal::Buffers buffers(call);
  std::vector<at::Tensor> lane{
      buffers.move(tensor, sends ? Use::read : Use::write)};
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] {
        return internal::Agreed{
            c10::str(internal::describe(tensor), ", src ", src)};
      },
      [&] { return backend.broadcast(lane, opts); });
}

WorkPtr all_gather(at::TensorList tensor_list, const at::Tensor& tensor,
                   const CollectiveOptions& options) {
  internal::Call call("all_gather", options.group, options.timeout);
  internal::require_dense(call, "the tensor", tensor);
  internal::require_list(call, "tensor_list", tensor_list, tensor);
  internal::require_shape(call, "the tensor", tensor,
                          tensor_list[call.group->rank()]);
  // Shared memory takes different shapes as they are, and compares each pair's
  // sizes.
  if (!internal::traits_of(call.backend(tensor)).takes_lists_at_once() &&
      !std::all_of(tensor_list.begin(), tensor_list.end(), [&](const auto& t) {
        return t.sizes() == tensor.sizes();
      })) {
    return all_gather_uneven(std::move(call), tensor_list, tensor,
                             options.async_op);
  }
  auto& backend = call.backend(tensor);
  auto opts =
      internal::backend_options<c10d::AllgatherOptions>(call, options.async_op);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> inputs{buffers.move(tensor, Use::read)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (const auto& output : tensor_list) {
    outputs[0].push_back(buffers.move(output, Use::write));
  }
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] { return internal::Agreed{internal::describe(tensor_list)}; },
      [&] { return backend.allgather(outputs, inputs, opts); });
}

WorkPtr all_gather_into_tensor(const at::Tensor& output_tensor,
                               const at::Tensor& input_tensor,
                               const CollectiveOptions& options) {
  internal::Call call("all_gather_into_tensor", options.group, options.timeout);
  internal::require_dense(call, "output_tensor", output_tensor);
  internal::require_dense(call, "input_tensor", input_tensor);
  require_like(call, "input_tensor", input_tensor, "output_tensor",
               output_tensor);
  if (output_tensor.numel() != input_tensor.numel() * call.group->size()) {
    throw call.mistake(c10::str("output_tensor has ", output_tensor.numel(),
                                " elements; it must have those of "
                                "input_tensor, ",
                                input_tensor.numel(), ", for each of ",
                                call.group->size(), " ranks"));
  }
  auto& backend = call.backend(input_tensor);
  auto opts =
      internal::backend_options<c10d::AllgatherOptions>(call, options.async_op);
  internal::Buffers buffers(call);
  auto in = buffers.move(input_tensor, Use::read);
  auto out = buffers.move(output_tensor, Use::write);
  if (in.is_alias_of(out)) in = in.clone();
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] { return internal::Agreed{internal::describe(input_tensor)}; },
      [&] { return backend._allgather_base(out, in, opts); });
}

WorkPtr all_gather_coalesced(
    const std::vector<std::vector<at::Tensor>>& output_tensor_lists,
    at::TensorList input_tensor_list, const CollectiveOptions& options) {
  internal::Call call("all_gather_coalesced", options.group, options.timeout);
  if (input_tensor_list.empty()) {
    throw call.mistake("input_tensor_list is empty; give at least one tensor");
  }
  if (static_cast<int>(output_tensor_lists.size()) != call.group->size()) {
    throw call.mistake(
        c10::str("output_tensor_lists holds ", output_tensor_lists.size(),
                 " lists; give one for each rank (", call.group->size(), ")"));
  }
  for (const auto& input : input_tensor_list) {
    internal::require_dense(call, "a tensor of input_tensor_list", input);
    if (input.device() != input_tensor_list[0].device()) {
      throw call.mistake(c10::str(
          "input_tensor_list holds tensors of ", input_tensor_list[0].device(),
          " and ", input.device(), "; give tensors of one device"));
    }
  }
  for (size_t rank = 0; rank < output_tensor_lists.size(); ++rank) {
    const auto& list = output_tensor_lists[rank];
    if (list.size() != input_tensor_list.size()) {
      throw call.mistake(c10::str("output_tensor_lists[", rank, "] holds ",
                                  list.size(),
                                  " tensors; give one for each of ",
                                  input_tensor_list.size(), " inputs"));
    }
    for (size_t i = 0; i < list.size(); ++i) {
      auto name = c10::str("output_tensor_lists[", rank, "][", i, "]");
      internal::require_dense(call, name.c_str(), list[i]);
      require_like(call, name.c_str(), list[i], "its input",
                   input_tensor_list[i]);
      internal::require_shape(call, name.c_str(), list[i],
                              input_tensor_list[i]);
    }
  }
  auto& backend = call.backend(input_tensor_list[0]);
  auto opts =
      internal::backend_options<c10d::AllgatherOptions>(call, options.async_op);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> inputs;
  for (const auto& input : input_tensor_list) {
    inputs.push_back(buffers.move(input, Use::read));
  }
  // `outputs` is ordered by input, because Gloo's own coalescing wants one
  // dtype.
  std::vector<std::vector<at::Tensor>> outputs(inputs.size());
  std::vector<std::vector<at::Tensor>> by_rank;
  for (const auto& list : output_tensor_lists) {
    by_rank.emplace_back();
    for (size_t i = 0; i < list.size(); ++i) {
      by_rank.back().push_back(buffers.move(list[i], Use::write));
      outputs[i].push_back(by_rank.back().back());
    }
  }
  call.parts = static_cast<uint16_t>(inputs.size());
  const bool at_once = internal::traits_of(backend).takes_lists_at_once();
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] { return internal::Agreed{internal::describe(input_tensor_list)}; },
      [&] {
        // One call, so that a failure ends it on all ranks at the same tensor.
        if (at_once) return backend.allgather_coalesced(by_rank, inputs, opts);
        std::vector<WorkPtr> works;
        for (size_t i = 0; i < inputs.size(); ++i) {
          std::vector<at::Tensor> in{inputs[i]};
          std::vector<std::vector<at::Tensor>> out{outputs[i]};
          works.push_back(backend.allgather(out, in, opts));
        }
        return internal::join_works(std::move(works));
      });
}

WorkPtr gather(const at::Tensor& tensor, at::TensorList gather_list, int dst,
               const CollectiveOptions& options) {
  internal::Call call("gather", options.group, options.timeout);
  internal::require_dense(call, "the tensor", tensor);
  auto& backend = call.backend(tensor);
  auto opts =
      internal::backend_options<c10d::GatherOptions>(call, options.async_op);
  opts.rootRank = call.member("dst", dst);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> inputs{buffers.move(tensor, Use::read)};
  std::vector<std::vector<at::Tensor>> outputs;
  if (!is_empty_elsewhere(call, "gather_list", static_cast<int>(opts.rootRank),
                          gather_list)) {
    internal::require_list(call, "gather_list", gather_list, tensor);
    for (const auto& output : gather_list) {
      internal::require_shape(call, "a tensor of gather_list", output, tensor);
    }
    outputs.emplace_back();
    for (const auto& output : gather_list) {
      outputs[0].push_back(buffers.move(output, Use::write));
    }
  }
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] {
        return internal::Agreed{
            c10::str(internal::describe(tensor), ", dst ", dst)};
      },
      [&] { return backend.gather(outputs, inputs, opts); });
}

WorkPtr scatter(const at::Tensor& tensor, at::TensorList scatter_list, int src,
                const CollectiveOptions& options) {
  internal::Call call("scatter", options.group, options.timeout);
  internal::require_dense(call, "the tensor", tensor);
  auto& backend = call.backend(tensor);
  auto opts =
      internal::backend_options<c10d::ScatterOptions>(call, options.async_op);
  opts.rootRank = call.member("src", src);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> outputs{buffers.move(tensor, Use::write)};
  std::vector<std::vector<at::Tensor>> inputs;
  if (!is_empty_elsewhere(call, "scatter_list", static_cast<int>(opts.rootRank),
                          scatter_list)) {
    internal::require_list(call, "scatter_list", scatter_list, tensor);
    inputs.emplace_back();
    for (const auto& input : scatter_list) {
      internal::require_shape(call, "a tensor of scatter_list", input, tensor);
      inputs[0].push_back(buffers.move(input, Use::read));
    }
  }
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] {
        return internal::Agreed{
            c10::str(internal::describe(tensor), ", src ", src)};
      },
      [&] { return backend.scatter(outputs, inputs, opts); });
}

WorkPtr all_to_all(at::TensorList output_tensor_list,
                   at::TensorList input_tensor_list,
                   const CollectiveOptions& options) {
  internal::Call call("all_to_all", options.group, options.timeout);
  if (input_tensor_list.empty()) {
    throw call.mistake(
        "input_tensor_list is empty; give one tensor for each rank");
  }
  internal::require_dense(call, "input_tensor_list[0]", input_tensor_list[0]);
  const auto& like = input_tensor_list[0];
  internal::require_list(call, "input_tensor_list", input_tensor_list, like);
  internal::require_list(call, "output_tensor_list", output_tensor_list, like);
  auto& backend = call.backend(like);
  auto opts =
      internal::backend_options<c10d::AllToAllOptions>(call, options.async_op);
  internal::Buffers buffers(call);
  // Uses one tensor with split sizes, which every backend takes if shapes
  // differ; no rank can tell whether the shapes of all others do.
  std::vector<at::Tensor> parts;
  std::vector<int64_t> send_counts;
  for (const auto& input : input_tensor_list) {
    parts.push_back(buffers.move(input, Use::read));
    send_counts.push_back(parts.back().numel());
  }
  auto in = at::cat(parts);
  const int64_t scale = like.is_complex() ? 2
                        : internal::known_to_backends(like.scalar_type())
                            ? 1
                            : static_cast<int64_t>(like.itemsize());
  std::vector<int64_t> recv_counts;
  for (const auto& output : output_tensor_list) {
    recv_counts.push_back(output.numel() * scale);
  }
  auto out = at::empty(
      {std::accumulate(recv_counts.begin(), recv_counts.end(), int64_t{0})},
      in.options());
  require_own_part(call, backend, send_counts, recv_counts);
  auto received = out.split_with_sizes(recv_counts);
  for (size_t i = 0; i < received.size(); ++i) {
    buffers.write_from(received[i], output_tensor_list[i]);
  }
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] {
        return internal::Agreed{c10::str(like.scalar_type()), send_counts,
                                recv_counts};
      },
      [&] {
        return backend.alltoall_base(out, in, recv_counts, send_counts, opts);
      });
}

WorkPtr all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const AllToAllSingleOptions& options) {
  internal::Call call("all_to_all_single", options.group, options.timeout);
  internal::require_dense(call, "output", output);
  internal::require_dense(call, "input", input);
  require_like(call, "output", output, "input", input);
  if (output.dim() == 0 || input.dim() == 0) {
    throw call.mistake(
        "a tensor without dimensions has no rows; give at least one dimension");
  }
  const int world_size = call.group->size();
  auto counts = [&](const char* argument, const at::Tensor& tensor,
                    std::vector<int64_t> splits) {
    const int64_t rows = tensor.size(0);
    if (splits.empty()) {
      if (rows % world_size != 0) {
        throw call.mistake(c10::str(argument, " has ", rows, " rows for ",
                                    world_size,
                                    " ranks; give split sizes, or a multiple"));
      }
      splits.assign(world_size, rows / world_size);
    }
    if (static_cast<int>(splits.size()) != world_size ||
        std::any_of(splits.begin(), splits.end(),
                    [](int64_t rows_of) { return rows_of < 0; }) ||
        std::accumulate(splits.begin(), splits.end(), int64_t{0}) != rows) {
      throw call.mistake(c10::str(
          argument, "_split_sizes are ", splits, "; they must be ", world_size,
          " numbers that add up to ", argument, "'s ", rows, " rows"));
    }
    return splits;
  };
  auto send_counts = counts("input", input, options.input_split_sizes);
  auto recv_counts = counts("output", output, options.output_split_sizes);
  if (input.sizes().slice(1) != output.sizes().slice(1)) {
    throw call.mistake(c10::str("a row of output is ", output.sizes().slice(1),
                                ", one of input ", input.sizes().slice(1),
                                "; they must be equal"));
  }
  auto& backend = call.backend(input);
  auto opts =
      internal::backend_options<c10d::AllToAllOptions>(call, options.async_op);
  internal::Buffers buffers(call);
  auto in = buffers.move(input, Use::read);
  auto out = buffers.move(output, Use::write);
  if (in.is_alias_of(out)) in = in.clone();
  // Backends count elements of the tensors that they get, not rows.
  const int64_t send_row = input.size(0) > 0 ? in.numel() / input.size(0) : 0;
  const int64_t recv_row =
      output.size(0) > 0 ? out.numel() / output.size(0) : 0;
  for (auto& count : send_counts) count *= send_row;
  for (auto& count : recv_counts) count *= recv_row;
  require_own_part(call, backend, send_counts, recv_counts);
  return internal::run_collective(
      std::move(call), options.async_op, std::move(buffers),
      [&] {
        return internal::Agreed{
            c10::str(input.scalar_type(), ", rows of ", input.sizes().slice(1)),
            send_counts, recv_counts};
      },
      [&] {
        return backend.alltoall_base(out, in, recv_counts, send_counts, opts);
      });
}

}  // namespace lockstep

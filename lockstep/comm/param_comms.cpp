#include "lockstep/comm/param_comms.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>
#include <utility>

namespace lockstep::internal {
namespace {

// Returns the name by which ProcessGroupNCCL records the operation, which trace
// tools know.
std::string c10d_name(const CommsCall& seen) {
  static constexpr std::pair<std::string_view, const char*> kNames[]{
      {"all_reduce", "allreduce"},
      {"all_reduce_coalesced", "allreduce_coalesced"},
      {"reduce_buckets", "allreduce"},
      {"all_gather_into_tensor", "_allgather_base"},
      {"reduce_scatter_tensor", "_reduce_scatter_base"},
      {"isend", "send"},
      {"irecv", "recv"},
  };
  const std::string_view name = seen.call.operation;
  if (name.starts_with("all_to_all")) {
    const auto differ = [](const std::vector<int64_t>& splits) {
      return std::ranges::adjacent_find(splits, std::not_equal_to<>()) !=
             splits.end();
    };
    return differ(seen.in_splits) || differ(seen.out_splits) ? "all_to_allv"
                                                             : "all_to_all";
  }
  for (const auto& [ours, c10ds] : kNames) {
    if (name == ours) return c10ds;
  }
  return std::string(name);
}

// Returns the first of the ranks, and the distance between them: -1 if they
// have several distances, and 0 if there is one rank, as ProcessGroupNCCL does.
std::pair<int, int> start_and_stride(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return {ranks[0], 0};
  const int stride = ranks[1] - ranks[0];
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != stride) return {ranks[0], -1};
  }
  return {ranks[0], stride};
}

}  // namespace

void ParamComms::begin(at::StepCallbacks&& callbacks, const CommsCall& seen) {
  const auto& [call, extent, async_op, in_splits, out_splits, inputs, outputs] =
      seen;
  const auto& group = *call.group;
  const bool is_default = group.name() == kDefaultGroupName;
  // Python calls the default group "0".
  const std::tuple<std::string, std::string> name{
      is_default ? "0" : group.name(), is_default ? group.name() : "undefined"};
  const int rank = call.peer < 0 ? group.rank() : group.group_rank(call.peer);
  const auto [start, stride] = start_and_stride(group.global_ranks());
  const auto number = static_cast<int64_t>(call.number);
  const bool is_message = call.number == 0;
  const std::string operation = c10d_name(seen);
  auto info = std::make_shared<torch::ParamCommsDebugInfo>(
      name, rank, std::string(operation), static_cast<int64_t>(extent.in),
      static_cast<int64_t>(extent.out),
      static_cast<at::ScalarType>(extent.type.code), in_splits, out_splits,
      start, stride, group.size(), async_op);
  info->setSequenceInfo(number, is_message);
  info_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO, std::move(info));
  function_.emplace(std::move(callbacks));
  if (function_->needsInputs()) {
    const std::vector<c10::IValue> arguments{
        c10::IValue(inputs),
        c10::IValue(std::make_tuple(number, is_message)),
        c10::IValue(name),
        c10::IValue(rank),
        c10::IValue(operation),
        c10::IValue(in_splits),
        c10::IValue(out_splits),
        c10::IValue(start),
        c10::IValue(stride),
        c10::IValue(group.size()),
        c10::IValue(async_op)};
    function_->before(at::kParamCommsCallName, &arguments);
  } else {
    function_->before(at::kParamCommsCallName);
  }
  if (function_->needsOutputs()) {
    function_->setOutputs(std::vector<c10::IValue>(1, c10::IValue(outputs)));
  }
}

}  // namespace lockstep::internal

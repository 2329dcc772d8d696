#include "lockstep/parallel/zero/partition.h"

#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "lockstep/checkpoint/optimizer_fields.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/point_to_point.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

// Describes this rank's state; the rank then sends the tensors in this order.
json describe(const OptimizerState& mine,
              const std::vector<NumberedPiece>& pieces) {
  json all = json::array();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto found = mine.state.find(static_cast<int64_t>(i));
    if (found == mine.state.end()) continue;
    json tensors = json::array();
    json entry{{"parameter", pieces[i].parameter},
               {"begin", pieces[i].piece->range().begin},
               {"end", pieces[i].piece->range().end},
               {"shaped", pieces[i].piece->shaped()}};
    for (const auto& [name, value] : found->second) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (!tensor) continue;
      if (name == kStepName) {
        entry[kStepName] = tensor->item<double>();
      } else {
        tensors.push_back(name);
      }
    }
    entry["tensors"] = std::move(tensors);
    all.push_back(std::move(entry));
  }
  return all;
}

// Calls receive(flat) for each tensor that `description` announces, which must
// fill it, and copies it to its place in `whole`.
template <class Receive>
void assemble(OptimizerState& whole, const json& description,
              const std::vector<at::Tensor>& parameters, Receive receive) {
  for (const json& entry : description) {
    const auto number = entry.at("parameter").get<int64_t>();
    const at::Tensor& parameter = parameters[static_cast<size_t>(number)];
    const Range range{entry.at("begin"), entry.at("end")};
    auto& values = whole.state[number];
    if (entry.contains(kStepName)) {
      const double step = entry.at(kStepName);
      // As in Python the step is float32, which counts exactly up to here.
      const bool exact = step <= double{1 << 24};
      values[kStepName] =
          at::scalar_tensor(step, exact ? at::kFloat : at::kDouble);
    }
    for (const std::string name : entry.at("tensors")) {
      auto* tensor = std::get_if<at::Tensor>(&values[name]);
      if (!tensor) {
        values[name] = at::zeros_like(parameter.detach());
        tensor = std::get_if<at::Tensor>(&values[name]);
      }
      const at::Tensor flat = at::empty({range.size()}, tensor->options());
      receive(flat);
      if (entry.at("shaped").get<bool>()) {
        tensor->copy_(flat.view(tensor->sizes()));
      } else {
        memory_slice(*tensor, range).copy_(flat);
      }
    }
  }
}

}  // namespace

Partition::Partition(int world_size, bool cut)
    : cut_(cut), bytes_(static_cast<size_t>(world_size)) {}

std::vector<Ranges> Partition::add(const std::vector<at::Tensor>& parameters) {
  const auto world_size = static_cast<int64_t>(bytes_.size());
  std::vector<Ranges> all(parameters.size());
  std::vector<size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return parameters[a].nbytes() > parameters[b].nbytes();
  });
  for (size_t index : order) {
    const at::Tensor& parameter = parameters[index];
    const int64_t numel = parameter.numel();
    const auto item = static_cast<int64_t>(parameter.element_size());
    if (!cut_ || numel < kSmall * world_size ||
        !parameter.is_non_overlapping_and_dense()) {
      all[index] = whole(numel, numel * item);
      continue;
    }
    const int64_t piece = numel / world_size / kGrain * kGrain;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const int64_t end = rank + 1 < world_size ? piece * (rank + 1) : numel;
      all[index].push_back({piece * rank, end});
      bytes_[static_cast<size_t>(rank)] += (end - piece * rank) * item;
    }
  }
  return all;
}

Ranges Partition::whole(int64_t numel, int64_t bytes) {
  const auto least = std::min_element(bytes_.begin(), bytes_.end());
  *least += bytes;
  Ranges ranges;
  for (auto rank = bytes_.begin(); rank != bytes_.end(); ++rank) {
    // Ranks before the owner get an empty range at the start, ranks after it
    // one at the end.
    ranges.push_back({rank > least ? numel : 0, rank < least ? 0 : numel});
  }
  return ranges;
}

// These call the implementation of as_strided(): the dispatcher would take more
// time than it. Below autograd and its tracking of views, an alias is a plain
// tensor.
at::Tensor memory_slice(const at::Tensor& tensor, Range range) {
  return at::native::as_strided_tensorimpl(
      tensor, {range.size()}, {1}, tensor.storage_offset() + range.begin);
}

at::Tensor memory_alias(const at::Tensor& tensor) {
  return at::native::as_strided_tensorimpl(
      tensor, tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

void require_dense_gradient(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined() || gradient.layout() == c10::kStrided) return;
  throw std::invalid_argument(
      "ZeroRedundancyOptimizer: a parameter has a sparse gradient, which "
      "cannot be divided; make the embedding dense (sparse(false)), or leave "
      "its parameters out of the groups and give them to an optimizer of their "
      "own");
}

ParameterPiece::ParameterPiece(at::Tensor parameter, Range range, bool shaped)
    : parameter_(std::move(parameter)),
      range_(range),
      shaped_(shaped || !parameter_.is_non_overlapping_and_dense()),
      piece_(part_of(parameter_)) {}

at::Tensor ParameterPiece::part_of(const at::Tensor& whole) const {
  return shaped_ ? memory_alias(whole) : memory_slice(whole, range_);
}

void ParameterPiece::refresh() {
  const auto offset =
      static_cast<size_t>(range_.begin) * parameter_.element_size();
  if (piece_.const_data_ptr() ==
      static_cast<const char*>(parameter_.const_data_ptr()) + offset) {
    return;
  }
  piece_.set_data(part_of(parameter_));
}

const at::Tensor& ParameterPiece::gradient() {
  require_dense_gradient(parameter_);
  at::Tensor whole = parameter_.grad();
  if (!whole.defined()) return gradient_ = at::Tensor();
  if (!shaped_ && whole.strides() != parameter_.strides()) {
    const at::NoGradGuard no_grad;
    whole = at::empty_like(parameter_.detach(), whole.options()).copy_(whole);
    parameter_.mutable_grad() = whole;
  }
  const auto offset = static_cast<size_t>(range_.begin) * whole.element_size();
  if (!gradient_.defined() || !gradient_.is_alias_of(whole) || shaped_ ||
      gradient_.const_data_ptr() !=
          static_cast<const char*>(whole.const_data_ptr()) + offset) {
    gradient_ = part_of(whole);
  }
  return gradient_;
}

void ParameterPiece::take_gradient() { piece_.mutable_grad() = gradient(); }

void ParameterPiece::drop_gradient() {
  piece_.mutable_grad() = at::Tensor();
  gradient_ = at::Tensor();
}

void gather_state(OptimizerState& whole, const OptimizerState& mine,
                  const std::vector<NumberedPiece>& pieces,
                  const std::vector<at::Tensor>& parameters, int to,
                  const ProcessGroupPtr& group) {
  const json own = describe(mine, pieces);
  std::vector<at::Tensor> tensors;
  for (const auto& [index, values] : mine.state) {
    for (const auto& [name, value] : values) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (tensor && name != kStepName) tensors.push_back(tensor->flatten());
    }
  }
  const int destination = group->global_rank(to);
  std::vector<json> all{own};
  if (group->size() > 1) {
    all = gather_object(own, destination, {.group = group});
  }
  if (group->rank() != to) {
    for (const at::Tensor& tensor : tensors) {
      send(tensor.contiguous(), destination, {.group = group});
    }
    return;
  }
  for (int rank = 0; rank < group->size(); ++rank) {
    auto next = tensors.begin();
    assemble(whole, all[static_cast<size_t>(rank)], parameters,
             [&](const at::Tensor& flat) {
               if (rank == to) {
                 flat.copy_(*next++);
               } else {
                 recv(flat, group->global_rank(rank), {.group = group});
               }
             });
  }
}

OptimizerState slice_state(const OptimizerState& whole,
                           const std::vector<NumberedPiece>& pieces) {
  OptimizerState part;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto found = whole.state.find(pieces[i].parameter);
    if (found == whole.state.end()) continue;
    auto& values = part.state[static_cast<int64_t>(i)];
    for (const auto& [name, value] : found->second) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (tensor && name != kStepName) {
        values[name] = pieces[i].piece->part_of(*tensor);
      } else {
        values[name] = value;
      }
    }
  }
  return part;
}

}  // namespace lockstep::internal

#include "lockstep/parallel/zero/sharded_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <nlohmann/json.hpp>
#include <string>
#include <variant>

#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/point_to_point.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

// The name of the only scalar tensor in a state_dict(); all other tensors have
// their parameter's shape.
constexpr const char* kStep = "step";

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
      if (name == kStep) {
        entry["step"] = tensor->item<double>();
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
    if (entry.contains("step")) {
      const double step = entry.at("step");
      // As in Python the step is float32, which counts exactly up to here.
      const bool exact = step <= double{1 << 24};
      values[kStep] = at::scalar_tensor(step, exact ? at::kFloat : at::kDouble);
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

void gather_state(OptimizerState& whole, const OptimizerState& mine,
                  const std::vector<NumberedPiece>& pieces,
                  const std::vector<at::Tensor>& parameters, int to,
                  const ProcessGroupPtr& group) {
  const json own = describe(mine, pieces);
  std::vector<at::Tensor> tensors;
  for (const auto& [index, values] : mine.state) {
    for (const auto& [name, value] : values) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (tensor && name != kStep) tensors.push_back(tensor->flatten());
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
      if (tensor && name != kStep) {
        values[name] = pieces[i].piece->part_of(*tensor);
      } else {
        values[name] = value;
      }
    }
  }
  return part;
}

}  // namespace lockstep::internal

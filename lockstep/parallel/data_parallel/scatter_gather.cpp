#include "lockstep/parallel/data_parallel/scatter_gather.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/adaptive.h>

#include <sstream>
#include <stdexcept>

#include "lockstep/comm/version_of.h"
#include "lockstep/parallel/data_parallel/node_streams.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::string shape(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

int64_t piece_size(int64_t rows, size_t devices) {
  const auto count = static_cast<int64_t>(devices);
  return std::max<int64_t>(1, (rows + count - 1) / count);
}

// Returns a copy of rows [begin, begin + size). If all rows are the same
// memory, which expand() makes, so are those of the copy.
at::Tensor copied_rows(const at::Tensor& tensor, int64_t dim, int64_t begin,
                       int64_t size, const at::Device& device) {
  const bool expanded = size > 1 && tensor.stride(dim) == 0;
  const auto rows = tensor.narrow(dim, begin, expanded ? 1 : size);
  const auto copy = rows.to(tensor.options().device(device),
                            device.type() != at::kCPU, /*copy=*/true);
  if (!expanded) return copy;
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = size;
  return copy.expand(sizes).variable_data();
}

// The pieces are copies. If they were views, they would share one version
// counter: a replica that writes into its piece would invalidate what the
// others saved for backward, and several threads would change the history of
// one tensor. If they only shared the memory, neither the replicas nor the
// caller would notice what the other one writes there.
struct Divide : torch::autograd::Function<Divide> {
  static variable_list forward(AutogradContext* context,
                               const at::Tensor& tensor,
                               const std::vector<at::Device>& devices,
                               int64_t dim) {
    context->saved_data["dim"] = dim;
    context->saved_data["device"] = tensor.device();
    const int64_t rows = tensor.size(dim);
    const int64_t size = piece_size(rows, devices.size());
    variable_list pieces;
    for (int64_t begin = 0; begin < rows || begin == 0; begin += size) {
      pieces.push_back(copied_rows(tensor, dim, begin,
                                   std::min(size, rows - begin),
                                   devices[pieces.size()]));
    }
    return pieces;
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const auto device = context->saved_data["device"].toDevice();
    const auto dim = context->saved_data["dim"].toInt();
    const auto joined = internal::across_devices(
        torch::autograd::get_current_node()->stream(), gradients, device, [&] {
          variable_list pieces;
          for (const auto& gradient : gradients) {
            pieces.push_back(gradient.to(device));
          }
          return at::cat(pieces, dim);
        });
    return {joined, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Scatter::Scatter(std::vector<at::Device> devices, int64_t dim)
    : devices_(std::move(devices)), dim_(dim) {}

std::vector<at::Tensor> Scatter::divide(const at::Tensor& tensor) {
  if (tensor.dim() == 0) {
    throw std::invalid_argument(
        "DataParallel was given a tensor without dimensions, which it cannot "
        "divide over the devices: pass it as a number, which all replicas get, "
        "or with a dimension of the batch");
  }
  const auto known = std::ranges::find_if(
      divided_,
      [&](const Divided& divided) { return divided.tensor.is_same(tensor); });
  if (known != divided_.end()) return known->pieces;
  const auto dim = at::maybe_wrap_dim(dim_, tensor.dim());
  auto pieces = devices_.size() == 1 ? std::vector{tensor.to(devices_.front())}
                                     : Divide::apply(tensor, devices_, dim);
  if (parts_ && *parts_ != pieces.size()) {
    throw std::invalid_argument(
        "DataParallel divides all tensors along dimension " +
        std::to_string(dim_) + ", but a tensor of shape " + shape(tensor) +
        " makes " + std::to_string(pieces.size()) +
        " parts and a tensor of shape " + first_shape_ + " " +
        std::to_string(*parts_) +
        ": give all tensors the same number of rows, and expand() those that "
        "are shared");
  }
  if (!parts_) {
    parts_ = pieces.size();
    first_shape_ = shape(tensor);
  }
  Divided divided{tensor, pieces, {}, {}};
  for (const auto& piece : pieces) {
    divided.versions.push_back(internal::version_of(piece));
    divided.nodes.push_back(piece.grad_fn());
  }
  divided_.push_back(std::move(divided));
  return pieces;
}

void Scatter::put_back() const {
  for (const auto& [tensor, pieces, versions, nodes] : divided_) {
    if (tensor.is_same(pieces.front()) ||
        std::ranges::equal(pieces, versions, {}, internal::version_of)) {
      continue;
    }
    // A leaf that requires grad may be written without recording.
    const bool is_recorded = !std::ranges::equal(
        pieces, nodes, {},
        [](const at::Tensor& piece) { return piece.grad_fn(); });
    const at::AutoGradMode mode(is_recorded && at::GradMode::is_enabled());
    std::vector<at::Tensor> here;
    for (const auto& piece : pieces) here.push_back(piece.to(tensor.device()));
    const auto whole = at::cat(here, at::maybe_wrap_dim(dim_, tensor.dim()));
    if (whole.sizes() == tensor.sizes()) {
      tensor.copy_(whole);
    } else {  // by unsqueeze_(), say, which the caller's tensor does not follow
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

std::vector<at::Tensor> DataParallelValue<at::Tensor>::scatter(
    const at::Tensor& value, Scatter& over) {
  if (!value.defined()) return std::vector<at::Tensor>(over.devices());
  return over.divide(value);
}

at::Tensor DataParallelValue<at::Tensor>::gather(
    const std::vector<at::Tensor>& parts, const GatherTarget& target) {
  for (const auto& part : parts) {
    internal::require_same_presence(parts.front().defined(), part.defined());
  }
  if (!parts.front().defined()) return {};
  const bool scalars =
      target.scalars_to_vector && target.dim == 0 &&
      std::ranges::all_of(parts, [](auto& part) { return part.dim() == 0; });
  std::vector<at::Tensor> here;
  here.reserve(parts.size());
  for (const auto& part : parts) {
    auto moved = part.to(target.device);
    here.push_back(scalars ? moved.unsqueeze(0) : std::move(moved));
  }
  return here.size() == 1 ? here.front() : at::cat(here, target.dim);
}

torch::nn::ASMoutput DataParallelValue<torch::nn::ASMoutput>::gather(
    const std::vector<torch::nn::ASMoutput>& parts,
    const GatherTarget& target) {
  std::vector<at::Tensor> outputs;
  double sum = 0;
  double rows = 0;
  for (const auto& part : parts) {
    outputs.push_back(part.output);
    sum += part.loss * static_cast<double>(part.output.numel());
    rows += static_cast<double>(part.output.numel());
  }
  return {DataParallelValue<at::Tensor>::gather(outputs, target), sum / rows};
}

namespace internal {

void require_same_size(size_t first, size_t other, const char* container) {
  if (first == other) return;
  throw std::invalid_argument(
      "the replicas of a DataParallel returned a " + std::string(container) +
      " of " + std::to_string(first) + " and one of " + std::to_string(other) +
      ": results that are joined must have the same members");
}

void throw_missing_key() {
  throw std::invalid_argument(
      "the replicas of a DataParallel returned maps with different keys: "
      "results that are joined must have the same members");
}

void require_same_presence(bool first, bool other) {
  if (first == other) return;
  throw std::invalid_argument(
      "some replicas of a DataParallel returned a tensor where others returned "
      "an undefined one: results that are joined must have the same members");
}

}  // namespace internal
}  // namespace lockstep

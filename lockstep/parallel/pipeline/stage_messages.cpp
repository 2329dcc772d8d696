#include "lockstep/parallel/pipeline/stage_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

namespace lockstep::internal {
namespace {

// A description on its way is this many numbers: how many tensors, and for each
// dtype, whether it requires grad, number of dimensions, and sizes.
constexpr int64_t kNumbers = 128;

// Between finished messages this many stay under way, for speed.
constexpr size_t kUnderWay = 4;

at::Tensor encoded(const Descriptions& descriptions) {
  std::vector<int64_t> numbers{static_cast<int64_t>(descriptions.size())};
  for (const TensorDescription& tensor : descriptions) {
    numbers.push_back(static_cast<int64_t>(tensor.dtype));
    numbers.push_back(tensor.requires_grad ? 1 : 0);
    numbers.push_back(static_cast<int64_t>(tensor.sizes.size()));
    numbers.insert(numbers.end(), tensor.sizes.begin(), tensor.sizes.end());
  }
  if (numbers.size() > kNumbers) {
    throw std::invalid_argument(
        "a stage returns too many tensors to describe them in one message (" +
        to_string(descriptions) + "); join some of them");
  }
  at::Tensor message = at::zeros({kNumbers}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), message.data_ptr<int64_t>());
  return message;
}

Descriptions decoded(const at::Tensor& message) {
  const at::Tensor on_host = message.to(at::kCPU);
  const int64_t* next = on_host.data_ptr<int64_t>();
  Descriptions descriptions(static_cast<size_t>(*next++));
  for (TensorDescription& tensor : descriptions) {
    tensor.dtype = static_cast<at::ScalarType>(*next++);
    tensor.requires_grad = *next++ != 0;
    const int64_t dimensions = *next++;
    tensor.sizes.assign(next, next + dimensions);
    next += dimensions;
  }
  return descriptions;
}

using torch::autograd::variable_list;

// Counts changes from 0 on, by itself: the micro-batches of a batch are views
// of one tensor, and a change of one is none of the others.
at::Tensor alias_of(const at::Tensor& input) { return input.variable_data(); }

struct StageInputs : torch::autograd::Function<StageInputs> {
  static variable_list forward(torch::autograd::AutogradContext* context,
                               at::TensorList inputs) {
    context->set_materialize_grads(false);
    // Not the inputs themselves, nor views of them, which autograd does not let
    // the caller change.
    variable_list aliases;
    for (const at::Tensor& input : inputs) aliases.push_back(alias_of(input));
    return aliases;
  }
  static variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                variable_list gradients) {
    return gradients;
  }
};

}  // namespace

Descriptions describe(const std::vector<at::Tensor>& tensors) {
  Descriptions descriptions;
  for (const at::Tensor& tensor : tensors) {
    descriptions.push_back(
        {tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()});
  }
  return descriptions;
}

std::string to_string(const Descriptions& descriptions) {
  std::string text;
  for (const TensorDescription& tensor : descriptions) {
    if (!text.empty()) text += ", ";
    text += c10::str(tensor.dtype, at::IntArrayRef(tensor.sizes),
                     tensor.requires_grad ? " with gradient" : "");
  }
  return text;
}

std::vector<at::Tensor> Arriving::wait() {
  for (const WorkPtr& work : works) work->wait();
  works.clear();
  if (used.defined()) {
    const at::Tensor on_host = used.to(at::kCPU);
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (on_host.const_data_ptr<int64_t>()[i] == 0) tensors[i].reset();
    }
    used.reset();
  }
  return std::exchange(tensors, {});
}

StageMessages::StageMessages(ProcessGroupPtr group, int micro_batches)
    : group_(std::move(group)), micro_batches_(micro_batches) {}

int StageMessages::tag_of(const Place& place, bool backward) const {
  // Tag 0 is that of users and of tied weights.
  return 1 + 2 * (place.stage * micro_batches_ + place.micro_batch) +
         (backward ? 1 : 0);
}

void StageMessages::post(const at::Tensor& tensor, const Place& place,
                         int tag) {
  at::Tensor sent = tensor.detach().contiguous();
  WorkPtr work = isend(sent, group_->global_rank(place.peer),
                       {.group = group_, .tag = tag});
  sends_.emplace_back(std::move(work), std::move(sent));
}

void StageMessages::send_forward(const Place& place,
                                 const std::vector<at::Tensor>& tensors) {
  const int tag = tag_of(place, /*backward=*/false);
  const Descriptions now = describe(tensors);
  const auto [told, is_new] =
      known_.try_emplace({place.stage, place.shapes}, now);
  if (is_new) {
    post(encoded(now).to(group_->control_device()), place, tag);
  } else if (told->second != now) {
    throw std::runtime_error(
        c10::str("stage ", place.stage, " returned ", to_string(now),
                 ", but for inputs of the same shapes it returned ",
                 to_string(told->second),
                 " before; make the pipeline again if the model has changed"));
  }
  finish_sends(kUnderWay);
  for (const at::Tensor& tensor : tensors) post(tensor, place, tag);
}

Arriving StageMessages::recv_forward(const Place& place, at::Device device) {
  const PointToPointOptions options{.group = group_,
                                    .tag = tag_of(place, /*backward=*/false)};
  const int source = group_->global_rank(place.peer);
  const std::pair key{place.stage, place.shapes};
  if (!known_.contains(key)) {
    const at::Tensor message = at::empty(
        {kNumbers},
        at::TensorOptions(at::kLong).device(group_->control_device()));
    recv(message, source, options);
    known_[key] = decoded(message);
  }
  Arriving arriving;
  for (const TensorDescription& tensor : known_.at(key)) {
    arriving.tensors.push_back(at::empty(
        tensor.sizes, at::TensorOptions(tensor.dtype).device(device)));
    arriving.works.push_back(irecv(arriving.tensors.back(), source, options));
  }
  return arriving;
}

const Descriptions& StageMessages::known(const Place& place) const {
  return known_.at({place.stage, place.shapes});
}

void StageMessages::send_backward(const Place& place,
                                  const std::vector<at::Tensor>& inputs,
                                  const std::vector<at::Tensor>& gradients) {
  finish_sends(kUnderWay);
  if (inputs.empty()) return;
  const int tag = tag_of(place, /*backward=*/true);
  std::vector<int64_t> used;
  for (const at::Tensor& gradient : gradients) {
    used.push_back(gradient.defined() ? 1 : 0);
  }
  post(at::tensor(used, at::kLong).to(group_->control_device()), place, tag);
  for (size_t i = 0; i < inputs.size(); ++i) {
    // The peer waits for a message of this size, which it then ignores.
    post(gradients[i].defined() ? gradients[i] : at::zeros_like(inputs[i]),
         place, tag);
  }
}

Arriving StageMessages::recv_backward(const Place& place,
                                      const std::vector<at::Tensor>& outputs) {
  Arriving arriving;
  if (outputs.empty()) return arriving;
  const int source = group_->global_rank(place.peer);
  const PointToPointOptions options{.group = group_,
                                    .tag = tag_of(place, /*backward=*/true)};
  arriving.used =
      at::empty({static_cast<int64_t>(outputs.size())},
                at::TensorOptions(at::kLong).device(group_->control_device()));
  arriving.works.push_back(irecv(arriving.used, source, options));
  for (const at::Tensor& output : outputs) {
    arriving.tensors.push_back(at::empty(output.sizes(), output.options()));
    arriving.works.push_back(irecv(arriving.tensors.back(), source, options));
  }
  return arriving;
}

void StageMessages::finish_sends(size_t left) {
  while (sends_.size() > left) {
    sends_.front().first->wait();
    sends_.pop_front();
  }
}

std::vector<at::Tensor> stage_inputs(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> results(inputs.size());
  variable_list tracked;
  std::vector<size_t> places;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (at::GradMode::is_enabled() && inputs[i].requires_grad()) {
      tracked.push_back(inputs[i]);
      places.push_back(i);
    } else {
      results[i] = alias_of(inputs[i]);
    }
  }
  if (tracked.empty()) return results;
  // A vector would not be recognised as tensors.
  variable_list aliases = StageInputs::apply(at::TensorList(tracked));
  for (size_t k = 0; k < places.size(); ++k) {
    results[places[k]] = std::move(aliases[k]);
  }
  return results;
}

void report_changes(const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& aliases) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    // Inference tensors do not count.
    if (aliases[i].is_inference() || aliases[i]._version() == 0) continue;
    inputs[i].unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace lockstep::internal

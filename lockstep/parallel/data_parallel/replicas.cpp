#include "lockstep/parallel/data_parallel/replicas.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/comm/version_of.h"
#include "lockstep/parallel/module/module_contents.h"
#include "lockstep/parallel/module/torch_versions.h"

namespace lockstep::internal {
namespace {

namespace autograd = torch::autograd;

// Adds up the gradients of a parameter's copies, in the order of the replicas.
struct AddReplicas : autograd::Node {
  explicit AddReplicas(const autograd::Edge& next) : Node({next}) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    at::Tensor sum;
    bool own = false;  // whether no other tensor has `sum`'s memory
    for (auto& gradient : gradients) {
      if (!gradient.defined()) continue;  // this replica was not used
      auto here = gradient.to(device);
      if (!sum.defined()) {
        sum = std::move(here);
      } else if (own && !at::GradMode::is_enabled()) {
        sum.add_(here);
      } else {
        sum = sum + here;
        own = true;
      }
    }
    return {std::move(sum)};
  }

  at::Device device = at::kCPU;
};

// Returns another tensor object with the same memory, which autograd and
// version counters do not know.
at::Tensor untracked(const at::Tensor& tensor) {
  return tensor.variable_data();
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.layout() == b.layout() &&
         a.sizes() == b.sizes();
}

bool same_data(const at::Tensor& a, const at::Tensor& b) {
  return same_layout(a, b) && a.is_alias_of(b) &&
         a.storage_offset() == b.storage_offset() && a.strides() == b.strides();
}

std::vector<torch::nn::Module*> children_of(const torch::nn::Module& module) {
  std::vector<torch::nn::Module*> children;
  for (const auto& child : module.modules(/*include_self=*/false)) {
    children.push_back(child.get());
  }
  return children;
}

void set_training(torch::nn::Module& replica,
                  const torch::nn::Module& original) {
  if (replica.is_training() != original.is_training()) {
    replica.train(original.is_training());
  }
}

void require(const at::Tensor& tensor, const at::Device& device) {
  if (tensor.device() == device) return;
  throw std::invalid_argument(
      "DataParallel: the module must have its parameters and buffers on "
      "device " +
      device.str() + " (the first of device_ids), but one is on " +
      tensor.device().str());
}

constexpr const char* kPurpose = "DataParallel cannot replicate";

}  // namespace

Replicas::Replicas(const torch::nn::Module& module,
                   std::vector<at::Device> devices, ReplicaMemory memory)
    : devices_(std::move(devices)), memory_(memory) {
  make(module);
}

void Replicas::make(const torch::nn::Module& module) {
  at::NoGradGuard no_grad;
  c10::InferenceMode no_inference(false);
  replicas_.clear();
  tensors_.clear();
  children_ = children_of(module);
  replica_children_.clear();
  for (size_t number = 1; number < devices_.size(); ++number) {
    replicas_.push_back(clone_module(module, devices_[number], kPurpose));
    replica_children_.push_back(children_of(*replicas_.back()));
    if (replica_children_.back().size() != children_.size()) {
      throw_not_cloneable(module, "its clone() has other children", kPurpose);
    }
  }
  for (const auto& parameter : module.named_parameters()) {
    add(parameter.key(), parameter.value(), false);
  }
  for (const auto& buffer : module.named_buffers()) {
    add(buffer.key(), buffer.value(), true);
  }
}

void Replicas::add(const std::string& name, const at::Tensor& original,
                   bool is_buffer) {
  Copied tensor{name, original, is_buffer, {}, {}, {}};
  for (const auto& replica : replicas_) {
    const auto all =
        is_buffer ? replica->named_buffers() : replica->named_parameters();
    const auto* copy = all.find(name);
    if (copy == nullptr || !copy->defined() || copy->is_same(original)) {
      throw_not_cloneable(
          *replica, "its clone() has no " + name + " of its own", kPurpose);
    }
    copy->unsafeGetTensorImpl()->set_requires_grad(false);
    tensor.copies.push_back(*copy);
    tensor.versions.push_back(version_of(original));
  }
  tensors_.push_back(std::move(tensor));
}

bool Replicas::still_fit(const torch::nn::Module& module) const {
  auto now = module.parameters();
  for (const auto& buffer : module.buffers()) now.push_back(buffer);
  if (now.size() != tensors_.size()) return false;
  for (size_t i = 0; i < now.size(); ++i) {
    if (!now[i].is_same(tensors_[i].original)) return false;
  }
  return children_of(module) == children_;
}

void Replicas::refresh(const torch::nn::Module& module, size_t count) {
  if (!still_fit(module)) make(module);
  at::NoGradGuard no_grad;
  for (auto& tensor : tensors_) {
    bool moved = false;
    for (size_t copy = 0; copy + 1 < count; ++copy) {
      moved |= refresh_copy(tensor, copy);
    }
    const auto& original = tensor.original;
    auto gradient = original.requires_grad()
                        ? autograd::impl::gradient_edge(original)
                        : autograd::Edge();
    if (moved || gradient != tensor.gradient) {
      tensor.gradient = std::move(gradient);
      set_gradient(tensor);
    }
    tensor.writes = writes(tensor);
  }
  for (size_t replica = 0; replica + 1 < count; ++replica) {
    // train() also sets the children, so outer modules come before inner ones.
    set_training(*replicas_[replica], module);
    for (size_t child = 0; child < children_.size(); ++child) {
      set_training(*replica_children_[replica][child], *children_[child]);
    }
  }
}

bool Replicas::refresh_copy(Copied& tensor, size_t copy) {
  const auto& from = tensor.original;
  auto& to = tensor.copies[copy];
  const auto& device = devices_[copy + 1];
  require(from, devices_.front());
  if (memory_ == ReplicaMemory::kShared && !tensor.is_buffer &&
      device == from.device() && !from.is_inference()) {
    if (same_data(from, to)) return false;
    to.set_data(untracked(from));
    // The copy shares the version counter with the memory, so that a step
    // between forward and backward is noticed, whichever replica saved the
    // parameter.
    autograd::impl::set_version_counter(to,
                                        autograd::impl::version_counter(from));
    return true;
  }
  const bool fits = same_layout(from, to) && to.device() == device;
  if (!fits) to.set_data(at::empty_like(from, from.options().device(device)));
  // The copy counts as a change only if the original has changed: otherwise
  // what an earlier forward saved is still right.
  untracked(to).copy_(untracked(from), /*non_blocking=*/!device.is_cpu());
  const auto now = version_of(from);
  if (now != std::exchange(tensor.versions[copy], now)) {
    autograd::impl::bump_version(to);
  }
  return !fits;
}

void Replicas::set_gradient(Copied& tensor) {
  if (!tensor.gradient.is_valid()) {
    for (const auto& copy : tensor.copies) {
      if (copy.grad_fn()) autograd::impl::set_gradient_edge(copy, {});
    }
    return;
  }
  auto add = make_node<AddReplicas>(tensor.gradient);
  add->device = tensor.original.device();
  for (const auto& copy : tensor.copies) {
    const auto input = add->add_input_metadata(copy);
    autograd::impl::set_gradient_edge(copy, {add, input});
  }
}

int64_t Replicas::writes(const Copied& tensor) {
  int64_t count = version_of(tensor.original);
  for (const auto& copy : tensor.copies) count += version_of(copy);
  return count;
}

void Replicas::require_unwritten() const {
  for (const auto& tensor : tensors_) {
    if (tensor.is_buffer || writes(tensor) == tensor.writes) continue;
    throw std::logic_error(
        "DataParallel: forward has written parameter '" + tensor.name +
        "', which replicas of one device share, so that they write it at the "
        "same time, and of which others have a copy, which is lost. Write "
        "parameters outside of forward (as the max_norm of an Embedding, by "
        "renorm_()); what forward itself must write can be a buffer");
  }
}

void require_on_device(const torch::nn::Module& module,
                       const at::Device& device) {
  for (const auto& parameter : module.parameters()) require(parameter, device);
  for (const auto& buffer : module.buffers()) require(buffer, device);
}

}  // namespace lockstep::internal

#include "lockstep/parallel/ddp/distributed_data_parallel.h"

#include <stdexcept>
#include <unordered_set>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/broadcast_coalesced.h"
#include "lockstep/parallel/ddp/model_agreement.h"

namespace lockstep::detail {
namespace {

int64_t mebibytes(const char* option, double value) {
  if (!(value > 0) || value > 1 << 20) {
    throw std::invalid_argument(c10::str("DistributedDataParallel: ", option,
                                         " is ", value,
                                         "; allowed is more than 0, in MiB"));
  }
  return static_cast<int64_t>(value * (1 << 20));
}

BucketLimits limits_of(const DistributedDataParallelOptions& options) {
  auto cap = mebibytes("bucket_cap_mb", options.bucket_cap_mb.value_or(25));
  auto first =
      mebibytes("first_bucket_mb", options.first_bucket_mb.value_or(1));
  bool first_as_others = options.bucket_cap_mb && !options.first_bucket_mb;
  return {.first_bytes = first_as_others ? cap : first, .cap_bytes = cap};
}

// Tied tensors once, by their first name.
std::vector<NamedParameter> unique(
    const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<NamedParameter> all;
  for (const auto& item : tensors) {
    if (!item.value().defined() ||
        !seen.insert(item.value().unsafeGetTensorImpl()).second) {
      continue;
    }
    all.push_back({item.key(), item.value()});
  }
  return all;
}

}  // namespace

DdpState::DdpState(torch::nn::Module& module,
                   DistributedDataParallelOptions options)
    : options_(std::move(options)) {
  auto limits = limits_of(options_);
  auto& group = options_.process_group;
  if (!group) group = default_group();
  auto all = unique(module.named_parameters());
  std::vector<NamedParameter> trained;
  for (const auto& parameter : all) {
    if (parameter.tensor.requires_grad()) trained.push_back(parameter);
  }
  if (trained.empty()) {
    throw std::invalid_argument(
        "DistributedDataParallel: the module has no parameter that requires "
        "grad; wrap modules that are trained, use the others as they are");
  }
  auto buffers = unique(module.named_buffers());
  for (const auto& buffer : buffers) buffers_.push_back(buffer.tensor);
  if (options_.init_sync && group->size() > 1) {
    verify_same_model(all, buffers, trained, group);
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : all) tensors.push_back(parameter.tensor);
    if (options_.broadcast_buffers) {
      tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
    }
    at::NoGradGuard no_grad;
    broadcast_coalesced(tensors, group->global_ranks()[0], group);
  }
  reducer_ = std::make_unique<Reducer>(std::move(trained), group, limits);
}

void DdpState::before_forward() {
  const auto& group = options_.process_group;
  bool trains = at::GradMode::is_enabled() && require_backward_grad_sync;
  if (at::GradMode::is_enabled()) reducer_->prepare(trains);
  if (options_.broadcast_buffers && require_forward_buffer_sync_ &&
      !buffers_.empty() && group->size() > 1) {
    // The graph of an earlier forward may hold the buffers and still be wanted.
    // As in Python it is not told: variable_data() counts changes for itself.
    std::vector<at::Tensor> data;
    for (const auto& buffer : buffers_) data.push_back(buffer.variable_data());
    at::NoGradGuard no_grad;
    broadcast_coalesced(data, group->global_ranks()[0], group);
  }
  require_forward_buffer_sync_ = trains;
}

}  // namespace lockstep::detail

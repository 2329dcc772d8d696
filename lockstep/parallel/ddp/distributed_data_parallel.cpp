#include "lockstep/parallel/ddp/distributed_data_parallel.h"

#include <stdexcept>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/module_state.h"

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

}  // namespace

DdpState::DdpState(torch::nn::Module& module,
                   DistributedDataParallelOptions options)
    : options_(std::move(options)) {
  BucketLimits limits{
      .first_bytes = mebibytes("first_bucket_mb", options_.first_bucket_mb),
      .cap_bytes = mebibytes("bucket_cap_mb", options_.bucket_cap_mb)};
  auto& group = options_.process_group;
  if (!group) group = default_group();
  std::vector<NamedParameter> all;
  std::vector<NamedParameter> trained;
  for (const auto& parameter : module.named_parameters()) {
    all.push_back({parameter.key(), parameter.value()});
    if (parameter.value().requires_grad()) trained.push_back(all.back());
  }
  if (trained.empty()) {
    throw std::invalid_argument(
        "DistributedDataParallel: the module has no parameter that requires "
        "grad; wrap modules that are trained, use the others as they are");
  }
  std::vector<NamedParameter> buffers;
  for (const auto& buffer : module.named_buffers()) {
    buffers.push_back({buffer.key(), buffer.value()});
    buffers_.push_back(buffer.value());
  }
  if (options_.init_sync && group->size() > 1) {
    verify_same_across_ranks(all, "parameter", group);
    verify_same_across_ranks(buffers, "buffer", group);
    std::vector<at::Tensor> tensors(buffers_);
    for (const auto& parameter : all) tensors.push_back(parameter.tensor);
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
    at::NoGradGuard no_grad;
    broadcast_coalesced(buffers_, group->global_ranks()[0], group);
  }
  require_forward_buffer_sync_ = trains;
}

}  // namespace lockstep::detail

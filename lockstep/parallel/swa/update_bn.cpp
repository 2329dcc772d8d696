#include "lockstep/parallel/swa/update_bn.h"

#include <torch/nn/modules/batchnorm.h>

#include "lockstep/parallel/nn/sync_batch_norm.h"

namespace lockstep::internal {
namespace {

// Resets the running statistics of `module` and returns its option momentum;
// nullptr if the module is not a batch norm of the types given.
template <typename... BatchNorms>
std::optional<double>* reset_plain(torch::nn::Module& module) {
  std::optional<double>* momentum = nullptr;
  const auto reset = [&](auto* norm) {
    if (!norm) return;
    norm->reset_running_stats();
    momentum = &norm->options.momentum();
  };
  (reset(dynamic_cast<BatchNorms*>(&module)), ...);
  return momentum;
}

template <typename... BatchNorms>
std::optional<double>* reset_synchronised(torch::nn::Module& module) {
  std::optional<double>* momentum = nullptr;
  const auto reset = [&](nn::SyncBatchNormState* norm) {
    if (!norm) return;
    if (norm->running_mean.defined()) {
      norm->running_mean.zero_();
      norm->running_var.fill_(1);
      norm->num_batches_tracked.zero_();
    }
    momentum = &norm->options.momentum();
  };
  (reset(dynamic_cast<BatchNorms*>(&module)), ...);
  return momentum;
}

}  // namespace

FreshStatistics::FreshStatistics(torch::nn::Module& module)
    : module_(module), was_training_(module.is_training()) {
  const auto add = [&](torch::nn::Module& part) {
    auto* momentum =
        reset_plain<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl,
                    torch::nn::BatchNorm3dImpl>(part);
    if (!momentum) {
      momentum =
          reset_synchronised<nn::SyncBatchNorm1dImpl, nn::SyncBatchNorm2dImpl,
                             nn::SyncBatchNorm3dImpl>(part);
    }
    if (!momentum) return;
    momenta_.emplace_back(momentum, *momentum);
    // No momentum means the plain average over all batches.
    momentum->reset();
  };
  add(module);
  for (const auto& part : module.modules(/*include_self=*/false)) add(*part);
  if (any()) module.train();
}

FreshStatistics::~FreshStatistics() {
  // A module that is registered twice was met with its momentum reset the
  // second time, so the first entry is restored last.
  for (auto entry = momenta_.rbegin(); entry != momenta_.rend(); ++entry) {
    *entry->first = entry->second;
  }
  if (any()) module_.train(was_training_);
}

}  // namespace lockstep::internal

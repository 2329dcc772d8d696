#pragma once

#include <torch/nn/module.h>

#include <concepts>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// Makes every batch norm in `module` a SyncBatchNorm of `process_group` (null
// means the default group), like torch.nn.SyncBatchNorm.convert_sync_batchnorm.
//
// It replaces children of Sequential, ModuleList and ModuleDict, at any depth.
// The new modules have the old ones' parameters and buffers (the same tensors,
// so that existing optimizers stay valid), training flag, options and names. A
// batch norm in several places becomes one SyncBatchNorm in all of them. An
// existing SyncBatchNorm gets the new group, in any kind of parent. Everything
// else (InstanceNorm, ...) stays as it is.
//
// LibTorch cannot replace a batch norm that a module holds as a member. A batch
// norm of a derived class is not replaced, either. If there is any of these, or
// if `module` itself is a batch norm, nothing is converted, and
// std::invalid_argument names them all.
//
// Call it before giving the module to DistributedDataParallel. Not collective.
void convert_sync_batchnorm(torch::nn::Module& module,
                            const ProcessGroupPtr& process_group = {});

// Does the same for a module holder or a std::shared_ptr, and returns it.
template <typename Holder>
  requires(!std::derived_from<Holder, torch::nn::Module>)
Holder convert_sync_batchnorm(Holder module,
                              const ProcessGroupPtr& process_group = {}) {
  torch::nn::Module& held = *module;
  convert_sync_batchnorm(held, process_group);
  return module;
}

}  // namespace lockstep::nn

#pragma once

#include <torch/nn/module.h>

#include <concepts>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// Makes every batch norm in `module` a SyncBatchNorm of `process_group` (none:
// the default group). After torch.nn.SyncBatchNorm.convert_sync_batchnorm.
//
// Replaced are children of Sequential, ModuleList and ModuleDict, at any depth.
// The new modules have the old ones' parameters and buffers (the same tensors,
// so that optimizers made before stay right), training flag, options and names;
// one that stands in several places stays one. A SyncBatchNorm gets the new
// group, wherever it is held. All else (InstanceNorm, ...) stays as it is.
//
// LibTorch cannot replace a batch norm that a module holds as a member of its
// own, nor is one of a class derived from BatchNorm replaced by something else.
// If there is one, nothing is converted, and std::invalid_argument names them
// all; `module` itself is one if it is a batch norm.
//
// Before DistributedDataParallel is given the module. Not collective.
void convert_sync_batchnorm(torch::nn::Module& module,
                            const ProcessGroupPtr& process_group = {});

// The same for a module holder or a std::shared_ptr, which is returned.
template <typename Holder>
  requires(!std::derived_from<Holder, torch::nn::Module>)
Holder convert_sync_batchnorm(Holder module,
                              const ProcessGroupPtr& process_group = {}) {
  torch::nn::Module& held = *module;
  convert_sync_batchnorm(held, process_group);
  return module;
}

}  // namespace lockstep::nn

#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/parallel/module/wrapped_module.h"

namespace lockstep {

template <typename Module>
class DistributedDataParallel;

// The argument `device` of torch.optim.swa_utils.update_bn.
struct UpdateBnOptions {
  // The device to which inputs are moved. None means that they stay where they
  // are.
  std::optional<at::Device> device{};
};

namespace internal {

// While it lives, every batch norm of a module, Lockstep's SyncBatchNorm
// included, is in training mode and computes the plain average of the
// statistics of all batches, from none on.
class FreshStatistics {
 public:
  explicit FreshStatistics(torch::nn::Module& module);
  // Restores the momenta and the module's mode.
  ~FreshStatistics();
  FreshStatistics(const FreshStatistics&) = delete;
  FreshStatistics& operator=(const FreshStatistics&) = delete;

  // Returns whether there is a batch norm.
  bool any() const { return !momenta_.empty(); }

 private:
  torch::nn::Module& module_;
  bool was_training_;
  // A batch norm's option, and its value before.
  std::vector<std::pair<std::optional<double>*, std::optional<double>>>
      momenta_;
};

// Returns the input of a batch: a tensor itself, `.data` of a DataLoader's
// batch or of torch::data::Example, the first element of a tuple or pair.
template <typename Batch>
at::Tensor input_of(const Batch& batch) {
  if constexpr (std::convertible_to<const Batch&, at::Tensor>) {
    return batch;
  } else if constexpr (requires { batch.data; }) {
    return batch.data;
  } else {
    return std::get<0>(batch);
  }
}

template <typename Model>
void run_forward(Model& model, const at::Tensor& input) {
  if constexpr (requires { model.forward(input); }) {
    model.forward(input);
  } else {
    model->forward(input);
  }
}
// Runs the module itself: a forward of the wrapper may send buffers, so that
// all ranks would have to make it.
template <typename Module>
void run_forward(DistributedDataParallel<Module>& model,
                 const at::Tensor& input) {
  WrapperAccess::state(model).await_parameters();
  run_forward(*model.module(), input);
}

}  // namespace internal

// Computes the running statistics of a model's batch norms anew, by a forward
// in training mode with each batch of `loader`, as
// torch.optim.swa_utils.update_bn (PyTorch documentation). For an AveragedModel
// that was made without `use_buffers`, after training:
//
//   update_bn(loader, average);
//
// `loader` is anything with begin() and end(); a batch is a tensor, has a
// member `data`, or is a tuple whose first element is the input. `model` is a
// module, a holder, a std::shared_ptr, or a wrapper with module(), whose
// forward takes the input. Without a batch norm, nothing is done.
//
// Ranks. With plain batch norms nothing is communicated, and each rank gets the
// statistics of the batches that it has seen. So give all ranks the same
// batches; or let one rank do it, also for a DistributedDataParallel, and
// broadcast the buffers. With SyncBatchNorm each rank takes its own part of the
// data, and all get the same statistics. There, and for a FullyShard, which
// gathers its parameters, all ranks must take part with equally many batches.
//
// If a forward throws, momenta and mode are restored and the statistics are
// incomplete.
template <typename Loader, typename Model>
void update_bn(Loader&& loader, Model& model,
               const UpdateBnOptions& options = {}) {
  const torch::NoGradGuard no_grad;
  const internal::FreshStatistics statistics(internal::module_of(model));
  if (!statistics.any()) return;
  for (auto&& batch : loader) {
    at::Tensor input = internal::input_of(batch);
    if (options.device) input = input.to(*options.device);
    internal::run_forward(model, input);
  }
}

}  // namespace lockstep

#include "lockstep/parallel/nn/sync_batch_norm.h"

#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/nn/sync_batch_norm_function.h"

namespace lockstep::internal {
namespace {

std::string type_name(size_t dimensions) {
  return "SyncBatchNorm" + std::to_string(dimensions) + 'd';
}

void check_input(const nn::SyncBatchNormState& state, size_t dimensions,
                 const at::Tensor& input) {
  std::ostringstream text;
  auto given = static_cast<size_t>(input.dim());
  if (given != dimensions + 2 && !(dimensions == 1 && given == 2)) {
    text << type_name(dimensions) << ": expected "
         << (dimensions == 1 ? "2D or 3" : std::to_string(dimensions + 2))
         << "D input (got " << given << "D input)";
  } else if (input.size(1) != state.options.num_features()) {
    text << type_name(dimensions) << ": expected input with "
         << state.options.num_features() << " channels, as num_features says, "
         << "got input size " << input.sizes();
  }
  if (!text.str().empty()) throw std::invalid_argument(text.str());
}

// Checked before anything is communicated, because the other ranks could not be
// told afterwards.
void check_dtypes(const nn::SyncBatchNormState& state, size_t dimensions,
                  const at::Tensor& input) {
  auto dtype = input.scalar_type();
  if (!at::isFloatingType(dtype)) {
    throw std::invalid_argument(type_name(dimensions) +
                                ": expected floating-point input, got " +
                                c10::toString(dtype));
  }
  auto statistics = at::toOpMathType(dtype);
  for (const auto& tensor :
       {state.weight, state.bias, state.running_mean, state.running_var}) {
    if (!tensor.defined() || tensor.scalar_type() == dtype ||
        tensor.scalar_type() == statistics) {
      continue;
    }
    throw std::invalid_argument(
        type_name(dimensions) + ": got " + c10::toString(dtype) +
        " input, but the module has " + c10::toString(tensor.scalar_type()) +
        "; give both the same dtype (module->to(dtype)), or the module float32 "
        "for a 16-bit input");
  }
}

// Returns the group to synchronise with; null if there is none to synchronise
// with.
ProcessGroupPtr group_of(const nn::SyncBatchNormState& state) {
  const auto group = internal::group_if_any(state.options.process_group());
  return group && group->size() > 1 ? group : nullptr;
}

// Counts this batch and returns its weight in the running statistics.
double next_momentum(nn::SyncBatchNormState& state) {
  const auto& momentum = state.options.momentum();
  if (!state.num_batches_tracked.defined()) return momentum.value_or(0);
  at::NoGradGuard no_grad;
  state.num_batches_tracked += 1;
  if (momentum) return *momentum;
  return 1 / state.num_batches_tracked.item<double>();
}

void check_alone(const at::Tensor& input) {
  int64_t values = input.size(0);
  for (int64_t size : input.sizes().slice(2)) values *= size;
  if (values != 1) return;
  std::ostringstream text;
  text << "SyncBatchNorm: Expected more than 1 value per channel when "
          "training, got input size "
       << input.sizes();
  throw std::invalid_argument(text.str());
}

}  // namespace

void reset(nn::SyncBatchNormState& state) {
  state.options.process_group().require_member();
  const bool affine = state.options.affine();
  const bool tracked = state.options.track_running_stats();
  at::IntArrayRef size = state.options.num_features();
  at::Tensor none;
  state.weight = affine ? at::ones(size).requires_grad_() : none;
  state.bias = affine ? at::zeros(size).requires_grad_() : none;
  state.running_mean = tracked ? at::zeros(size) : none;
  state.running_var = tracked ? at::ones(size) : none;
  state.num_batches_tracked = tracked ? at::zeros({}, at::kLong) : none;
}

at::Tensor forward(nn::SyncBatchNormState& state, size_t dimensions,
                   bool training, const at::Tensor& input) {
  check_input(state, dimensions, input);
  // Running statistics are used in eval mode and updated in training.
  bool tracked = !training || state.options.track_running_stats();
  auto running_mean = tracked ? state.running_mean : at::Tensor();
  auto running_var = tracked ? state.running_var : at::Tensor();
  auto group = training ? group_of(state) : nullptr;
  if (!group) {
    bool by_batch = training || !running_mean.defined();
    if (by_batch) check_alone(input);
    double momentum = training && tracked ? next_momentum(state) : 0;
    return at::batch_norm(input, state.weight, state.bias, running_mean,
                          running_var, by_batch, momentum, state.options.eps(),
                          at::globalContext().userEnabledCuDNN());
  }
  check_dtypes(state, dimensions, input);
  double momentum = tracked ? next_momentum(state) : 0;
  return sync_batch_norm(input.contiguous(input.suggest_memory_format()),
                         {.weight = state.weight,
                          .bias = state.bias,
                          .running_mean = running_mean,
                          .running_var = running_var,
                          .momentum = momentum,
                          .eps = state.options.eps(),
                          .group = group});
}

void pretty_print(const nn::SyncBatchNormState& state, size_t dimensions,
                  std::ostream& stream) {
  const auto& options = state.options;
  std::ostringstream text;  // keeps the flags of `stream` as they are
  text << std::boolalpha << "lockstep::nn::" << type_name(dimensions) << '('
       << options.num_features() << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    text << *options.momentum();
  } else {
    text << "None";
  }
  text << ", affine=" << options.affine()
       << ", track_running_stats=" << options.track_running_stats() << ')';
  stream << text.str();
}

}  // namespace lockstep::internal

#include "lockstep/parallel/nn/sync_batch_norm.h"

#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {
namespace {

struct SyncBatchNormCall {
  at::Tensor weight{}, bias{};               // undefined means 1 and 0
  at::Tensor running_mean{}, running_var{};  // undefined if not tracked
  double momentum = 0;                       // of the running statistics
  double eps = 0;
  ProcessGroupPtr group{};
};

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The statistics that forward gets from all ranks. The autograd context keeps
// it.
struct Statistics : torch::CustomClassHolder {
  ProcessGroupPtr group;
  double eps = 0;
  int64_t count = 0;  // values per channel on all ranks together
  // [C]; float32 for 16-bit inputs, else the input's dtype.
  at::Tensor mean;
  at::Tensor invstd;    // 1 / sqrt(variance + eps)
  at::Tensor variance;  // CPU only; divided by count
  // Accelerators only: [ranks with samples], int32; values per channel of each
  // of them.
  at::Tensor counts;
};
using StatisticsPtr = c10::intrusive_ptr<Statistics>;

at::TensorOptions statistics_options(const at::Tensor& input) {
  return input.options()
      .dtype(at::toOpMathType(input.scalar_type()))
      .memory_format(std::nullopt);
}

at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

// Makes [C] broadcast against `input`.
at::Tensor by_channel(const at::Tensor& tensor, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  return tensor.view(shape);
}

void check_count(int64_t count, const at::Tensor& input) {
  if (count != 1) return;
  std::ostringstream text;
  text << "SyncBatchNorm: Expected more than 1 value per channel when "
          "training, got 1 on all ranks together, and input size "
       << input.sizes()
       << " on this one; use larger batches, or eval() for single samples";
  throw std::invalid_argument(text.str());
}

void update_running(const at::Tensor& running, const at::Tensor& value,
                    double momentum) {
  if (!running.defined()) return;
  running.copy_(
      running.to(at::kDouble).mul_(1 - momentum).add_(value, momentum));
}

// Returns what a rank tells the others, as float64: mean and variance of each
// channel and the number of values in a channel; zeros if there are none. They
// are taken of the differences from each channel's first value, because float32
// has too few digits for a mean far from zero.
at::Tensor row_on_cpu(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  auto row = at::zeros({2 * channels + 1}, at::kDouble);
  if (input.numel() == 0) return row;
  auto first = input.select(0, 0)
                   .reshape({channels, -1})
                   .select(1, 0)
                   .to(at::toOpMathType(input.scalar_type()));
  auto [mean, variance] =
      at::batch_norm_update_stats(input - by_channel(first, input), {}, {}, 0);
  row.narrow(0, 0, channels).copy_(mean).add_(first);
  row.narrow(0, channels, channels).copy_(variance);
  row[-1] = input.numel() / channels;
  return row;
}

StatisticsPtr statistics_on_cpu(const at::Tensor& input,
                                const SyncBatchNormCall& call) {
  const int64_t channels = input.size(1);
  auto row = row_on_cpu(input);
  auto rows = at::empty({call.group->size(), row.numel()}, row.options());
  all_gather_into_tensor(rows, row, {.group = call.group});

  auto all = c10::make_intrusive<Statistics>();
  all->group = call.group;
  all->eps = call.eps;
  auto counts = rows.narrow(1, 2 * channels, 1);
  const auto count = counts.sum().item<double>();
  all->count = static_cast<int64_t>(count);
  check_count(all->count, input);
  auto shares = counts / std::max(count, 1.0);
  auto means = rows.narrow(1, 0, channels);
  auto mean = (means * shares).sum(0);
  // A rank's values deviate from the mean of all by as much as from their own,
  // and by the difference of the means.
  auto deviations =
      rows.narrow(1, channels, channels) + (means - mean).square();
  auto variance = (deviations * shares).sum(0);

  auto dtype = at::toOpMathType(input.scalar_type());
  all->mean = mean.to(dtype);
  all->variance = variance.to(dtype);
  all->invstd = (variance + call.eps).rsqrt_().to(dtype);
  if (all->count > 0) {
    update_running(call.running_mean, mean, call.momentum);
    update_running(call.running_var, variance * (count / (count - 1)),
                   call.momentum);
  }
  return all;
}

// 16-bit inputs may be empty on one rank only: so this rank's row always has
// the dtype of the other ranks' statistics.
at::Tensor row_on_device(const at::Tensor& input, double eps) {
  int64_t channels = input.size(1);
  auto options = statistics_options(input);
  if (input.numel() == 0) return at::zeros({2 * channels + 1}, options);
  auto [mean, invstd] = at::batch_norm_stats(input, eps);
  return at::cat(
      {mean, invstd, at::full({1}, input.numel() / channels, mean.options())});
}

StatisticsPtr statistics_on_device(const at::Tensor& input,
                                   const SyncBatchNormCall& call) {
  int64_t channels = input.size(1);
  auto row = row_on_device(input, call.eps);
  auto rows = at::empty({call.group->size(), row.numel()}, row.options());
  all_gather_into_tensor(rows, row, {.group = call.group});

  // The kernel divides by each rank's count, so ranks without values are left
  // out.
  auto counts = rows.select(1, 2 * channels);
  auto present = counts.nonzero().squeeze(1);
  if (present.numel() < call.group->size()) {
    rows = rows.index_select(0, present);
    counts = rows.select(1, 2 * channels);
  }
  auto all = c10::make_intrusive<Statistics>();
  all->group = call.group;
  all->eps = call.eps;
  all->counts = counts.to(at::kInt);
  all->count = counts.to(at::kLong).sum().item<int64_t>();
  check_count(all->count, input);
  if (all->count == 0) {
    all->mean = at::zeros({channels}, row.options());
    all->invstd = at::ones({channels}, row.options());
    return all;
  }
  if (call.running_mean.defined()) {
    counts = counts.to(call.running_mean.scalar_type());
  }
  std::tie(all->mean, all->invstd) = at::batch_norm_gather_stats_with_counts(
      input, rows.narrow(1, 0, channels).contiguous(),
      rows.narrow(1, channels, channels).contiguous(), call.running_mean,
      call.running_var, call.momentum, call.eps, counts.contiguous());
  return all;
}

struct Gradients {
  at::Tensor input{}, weight{}, bias{};
};

Gradients gradients_on_cpu(const at::Tensor& grad_output,
                           const at::Tensor& input, const at::Tensor& weight,
                           const Statistics& all, bool input_needed) {
  Gradients result;
  if (input.numel() > 0) {
    // Two sums over this rank's samples: of grad_output times the normalised
    // input, and of grad_output.
    std::tie(std::ignore, result.weight, result.bias) =
        at::native_batch_norm_backward(
            grad_output, input, /*weight=*/{}, /*running_mean=*/{},
            /*running_var=*/{}, all.mean, all.invstd, /*train=*/true,
            /*eps=*/0, {false, true, true});
  } else {
    result.weight = at::zeros_like(all.mean);
    result.bias = at::zeros_like(all.mean);
  }
  if (!input_needed) return result;
  auto sums = at::cat({result.bias, result.weight}).to(at::kDouble);
  all_reduce(sums, {.group = all.group});
  sums /= static_cast<double>(std::max<int64_t>(all.count, 1));
  auto means = sums.to(all.mean.scalar_type()).chunk(2);

  // (grad_output - means[0] - (input - mean) * invstd * means[1]) * scale: a
  // batch norm of the input with other weights, and the scaled grad_output.
  auto scale = weight.defined() ? all.invstd * weight : all.invstd;
  auto [sum, unused_mean, unused_invstd] = at::native_batch_norm(
      input.to(scale.scalar_type()), -means[1] * scale, -means[0] * scale,
      all.mean, all.variance, /*training=*/false, /*momentum=*/0, all.eps);
  result.input = sum.addcmul_(grad_output, by_channel(scale, input))
                     .to(input.scalar_type());
  return result;
}

// Does what torch.nn.SyncBatchNorm does, with the same numbers on the wire.
Gradients gradients_on_device(const at::Tensor& grad_output,
                              const at::Tensor& input, const at::Tensor& weight,
                              const Statistics& all, bool input_needed) {
  const int64_t channels = input.size(1);
  Gradients result;
  auto sums = at::zeros({2 * channels}, all.mean.options());
  if (input.numel() > 0) {
    at::Tensor sum_dy, sum_dy_xmu;
    std::tie(sum_dy, sum_dy_xmu, result.weight, result.bias) =
        at::batch_norm_backward_reduce(grad_output, input, all.mean, all.invstd,
                                       weight, input_needed, weight.defined(),
                                       weight.defined());
    if (input_needed) sums = at::cat({sum_dy, sum_dy_xmu});
  } else {
    result.weight = at::zeros_like(all.mean);
    result.bias = at::zeros_like(all.mean);
  }
  if (!input_needed) return result;
  all_reduce(sums, {.group = all.group});
  if (input.numel() == 0) {
    result.input = at::zeros_like(input);
    return result;
  }
  result.input = at::batch_norm_backward_elemt(
      grad_output, input, all.mean, all.invstd,
      in_dtype(weight, all.mean.scalar_type()), sums.narrow(0, 0, channels),
      sums.narrow(0, channels, channels), all.counts);
  return result;
}

class SyncBatchNormFunction
    : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& given_weight,
                            const std::optional<at::Tensor>& given_bias,
                            const SyncBatchNormCall& call) {
    auto weight = given_weight.value_or(at::Tensor());
    auto bias = given_bias.value_or(at::Tensor());
    auto all = input.is_cpu() ? statistics_on_cpu(input, call)
                              : statistics_on_device(input, call);
    context->save_for_backward({input, weight});
    context->saved_data["statistics"] = c10::IValue::make_capsule(all);
    if (input.numel() == 0) return at::empty_like(input);
    if (!input.is_cpu()) {
      return at::batch_norm_elemt(input, weight, bias, all->mean, all->invstd,
                                  call.eps);
    }
    // LibTorch's kernel for batch norm in eval mode; it takes 16-bit inputs
    // with everything else in float32.
    auto dtype = all->mean.scalar_type();
    return std::get<0>(at::native_batch_norm(
        input, in_dtype(weight, dtype), in_dtype(bias, dtype), all->mean,
        all->variance, /*training=*/false, /*momentum=*/0, call.eps));
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw std::runtime_error(
          "SyncBatchNorm has no second derivative; call backward() without "
          "create_graph");
    }
    auto saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    auto kept = context->saved_data["statistics"].toCapsule();
    const auto& all = static_cast<Statistics&>(*kept);
    auto grad_output =
        grad_outputs[0].contiguous(input.suggest_memory_format());
    auto result = (input.is_cpu() ? gradients_on_cpu : gradients_on_device)(
        grad_output, input, weight, all, context->needs_input_grad(0));
    if (!weight.defined()) return {result.input, {}, {}, {}};
    return {result.input,
            result.weight.to(weight.scalar_type()),
            result.bias.to(weight.scalar_type()),
            {}};
  }
};

// Returns (input - mean) / sqrt(variance + eps) * weight + bias, with autograd.
// Mean and variance are those of each channel over the samples of all ranks.
// `input`, [N, C, ...], is contiguous in its memory format, and so is the
// result; it may be empty on some ranks or all. It follows SyncBatchNorm in
// torch/nn/modules/_functions.py.
//
// Collective: one all_gather_into_tensor. On CPUs the ranks send and combine
// mean and variance as float64; on GPUs they send what Python sends, so that
// ranks of Python may be in the group. LibTorch sums a rank's own float32 input
// in float32 if it is [N, C] or channels-last, so from some 10 million values
// per channel and thread on its variance is inexact. Updates the running
// statistics with the unbiased variance, unless there are no samples.
//
// If `input` requires grad, which must be so on all ranks or on none, backward
// is collective (one all_reduce), because the statistics depend on every rank's
// input.
//
// Throws std::invalid_argument, on every rank and before anything is updated,
// if a channel has only one value on all ranks together.
at::Tensor sync_batch_norm(const at::Tensor& input,
                           const SyncBatchNormCall& call) {
  // LibTorch's Function does not take undefined tensors.
  auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return SyncBatchNormFunction::apply(input, given(call.weight),
                                      given(call.bias), call);
}

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

// Returns the weight of this batch, which is not counted yet, in the running
// statistics.
double next_momentum(const nn::SyncBatchNormState& state) {
  const auto& momentum = state.options.momentum();
  if (momentum) return *momentum;
  if (!state.num_batches_tracked.defined()) return 0;
  return 1 / (state.num_batches_tracked.item<double>() + 1);
}

// Called after the statistics are updated: a batch that is refused is not
// counted.
void count_batch(nn::SyncBatchNormState& state) {
  const at::NoGradGuard no_grad;
  if (state.num_batches_tracked.defined()) state.num_batches_tracked += 1;
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
  const bool updates = training && tracked;
  const double momentum = updates ? next_momentum(state) : 0;
  auto group = training ? group_of(state) : nullptr;
  at::Tensor result;
  if (group) {
    check_dtypes(state, dimensions, input);
    result = sync_batch_norm(input.contiguous(input.suggest_memory_format()),
                             {.weight = state.weight,
                              .bias = state.bias,
                              .running_mean = running_mean,
                              .running_var = running_var,
                              .momentum = momentum,
                              .eps = state.options.eps(),
                              .group = group});
  } else {
    bool by_batch = training || !running_mean.defined();
    if (by_batch) check_alone(input);
    result = at::batch_norm(
        input, state.weight, state.bias, running_mean, running_var, by_batch,
        momentum, state.options.eps(), at::globalContext().userEnabledCuDNN());
  }
  if (updates) count_batch(state);
  return result;
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

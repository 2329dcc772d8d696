#include "lockstep/parallel/nn/normalize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "lockstep/comm/reductions.h"
#include "lockstep/parallel/nn/input_gradient.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Keeps in the autograd context what is not a tensor.
struct KeptStatistics : torch::CustomClassHolder {
  explicit KeptStatistics(GroupStatistics given) : value(std::move(given)) {}
  GroupStatistics value;
};

at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

struct Gradients {
  at::Tensor input{}, weight{}, bias{};
};

// Uses LibTorch's kernels for batch norm in one process; they take 16-bit
// inputs with everything else in float32.
at::Tensor normalize_cpu(const at::Tensor& input, const at::Tensor& weight,
                         const at::Tensor& bias, const GroupStatistics& all) {
  auto dtype = all.mean.scalar_type();
  return std::get<0>(at::native_batch_norm(
      input, in_dtype(weight, dtype), in_dtype(bias, dtype), all.mean,
      all.variance, /*training=*/false, /*momentum=*/0, all.eps));
}

Gradients gradients_cpu(const at::Tensor& grad_output, const at::Tensor& input,
                        const at::Tensor& weight, const GroupStatistics& all,
                        bool input_needed) {
  const int64_t channels = input.size(1);
  Gradients result;
  if (input.numel() > 0) {
    // Two sums over this rank's samples: of grad_output times the normalised
    // input, and of grad_output.
    std::tie(std::ignore, result.weight, result.bias) =
        at::native_batch_norm_backward(
            grad_output, input, /*weight=*/{}, all.mean, all.variance, all.mean,
            all.invstd, /*train=*/true, all.eps, {false, true, true});
  } else {
    result.weight = at::zeros({channels}, all.mean.options());
    result.bias = at::zeros({channels}, all.mean.options());
  }
  if (!input_needed) return result;
  auto sums = at::cat({result.bias, result.weight}).to(at::kDouble);
  all_reduce(sums, {.group = all.group});
  if (all.count > 0) sums /= static_cast<double>(all.count);
  auto dtype = all.mean.scalar_type();
  auto scale = weight.defined() ? all.invstd * weight.to(dtype) : all.invstd;
  result.input = input_gradient(
      grad_output, input, all.mean, sums.narrow(0, 0, channels).to(dtype),
      sums.narrow(0, channels, channels).mul_(all.invstd).to(dtype), scale);
  return result;
}

// Does what torch.nn.SyncBatchNorm does, with the same numbers on the wire.
Gradients gradients_device(const at::Tensor& grad_output,
                           const at::Tensor& input, const at::Tensor& weight,
                           const GroupStatistics& all, bool input_needed) {
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
    result.weight = at::zeros({channels}, all.mean.options());
    result.bias = at::zeros({channels}, all.mean.options());
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

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& given_weight,
                            const std::optional<at::Tensor>& given_bias,
                            const GroupStatistics& all) {
    auto weight = given_weight.value_or(at::Tensor());
    auto bias = given_bias.value_or(at::Tensor());
    context->save_for_backward({input, weight});
    context->saved_data["statistics"] =
        c10::IValue::make_capsule(c10::make_intrusive<KeptStatistics>(all));
    if (input.numel() == 0) return at::empty_like(input);
    if (input.is_cpu()) return normalize_cpu(input, weight, bias, all);
    return at::batch_norm_elemt(input, weight, bias, all.mean, all.invstd,
                                all.eps);
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
    const auto& all = static_cast<KeptStatistics&>(*kept).value;
    auto grad_output =
        grad_outputs[0].contiguous(input.suggest_memory_format());
    auto result = (input.is_cpu() ? gradients_cpu : gradients_device)(
        grad_output, input, weight, all, context->needs_input_grad(0));
    if (!weight.defined()) return {result.input, {}, {}, {}};
    return {result.input,
            result.weight.to(weight.scalar_type()),
            result.bias.to(weight.scalar_type()),
            {}};
  }
};

}  // namespace

at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight,
                     const at::Tensor& bias,
                     const GroupStatistics& statistics) {
  // LibTorch's Function does not take undefined tensors.
  auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return Normalize::apply(input, given(weight), given(bias), statistics);
}

}  // namespace lockstep::nn

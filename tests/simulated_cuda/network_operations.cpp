// Operations of networks that only CUDA has: fused recurrent cells and
// depthwise convolutions. Their results are those of CUDA's kernels, as
// autograd's formulas expect them.

#include <ATen/native/ConvUtils.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "tests/simulated_cuda/device_interface.h"
#include "tests/simulated_cuda/operations.h"

namespace lockstep::internal::simulated_cuda {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// ---- Recurrent cells: gates are [batch, gates * hidden] ----

at::Tensor with_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

at::Tensor gradient_of_bias(const at::Tensor& gates, bool has_bias) {
  return has_bias ? gates.sum(0) : at::Tensor();
}

// The workspace holds the four gates: input, forget, cell and output.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates,
    const at::Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto gates = (with_bias(input_gates, input_bias) +
                with_bias(hidden_gates, hidden_bias))
                   .chunk(4, 1);
  for (size_t i = 0; i < gates.size(); ++i) {
    gates[i] = i == 2 ? gates[i].tanh() : gates[i].sigmoid();
  }
  const at::Tensor cy = gates[1] * cx + gates[0] * gates[2];
  return {gates[3] * cy.tanh(), cy, at::cat(gates, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
    const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace,
    bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const at::Tensor tanh_cy = cy.tanh();
  at::Tensor of_cell = at::zeros_like(cy);
  at::Tensor of_output = at::zeros_like(cy);
  if (grad_hy && grad_hy->defined()) {
    of_cell = *grad_hy * gates[3] * (1 - tanh_cy * tanh_cy);
    of_output = *grad_hy * tanh_cy;
  }
  if (grad_cy && grad_cy->defined()) of_cell = of_cell + *grad_cy;
  const at::Tensor grad_gates =
      at::cat({of_cell * gates[2] * gates[0] * (1 - gates[0]),
               of_cell * cx * gates[1] * (1 - gates[1]),
               of_cell * gates[0] * (1 - gates[2] * gates[2]),
               of_output * gates[3] * (1 - gates[3])},
              1);
  return {grad_gates, of_cell * gates[1],
          gradient_of_bias(grad_gates, has_bias)};
}

// The workspace holds the gates reset, update and new, the state before, and
// the part of the new gate that the reset gate multiplies.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates,
                                            const at::Tensor& hidden_gates,
                                            const at::Tensor& hx,
                                            const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const at::Tensor reset = (input[0] + hidden[0]).sigmoid();
  const at::Tensor update = (input[1] + hidden[1]).sigmoid();
  const at::Tensor fresh = (input[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh),
          at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
gru_cell_backward(const at::Tensor& grad_hy, const at::Tensor& workspace,
                  bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const at::Tensor& reset = saved[0];
  const at::Tensor& update = saved[1];
  const at::Tensor& fresh = saved[2];
  const at::Tensor of_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const at::Tensor of_update =
      grad_hy * (saved[3] - fresh) * update * (1 - update);
  const at::Tensor of_reset = of_fresh * saved[4] * reset * (1 - reset);
  const at::Tensor grad_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const at::Tensor grad_hidden =
      at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad_hy * update,
          gradient_of_bias(grad_input, has_bias),
          gradient_of_bias(grad_hidden, has_bias)};
}

// ---- Depthwise convolutions: a group for each channel of the input ----

at::Tensor depthwise(const at::Tensor& input, const at::Tensor& weight,
                     c10::SymIntArrayRef kernel_size,
                     const OptionalTensor& bias, c10::SymIntArrayRef stride,
                     c10::SymIntArrayRef padding,
                     c10::SymIntArrayRef dilation) {
  std::vector<int64_t> shape{input.size(0), weight.size(0)};
  const auto steps = C10_AS_INTARRAYREF_SLOW(stride).vec();
  const auto margins = C10_AS_INTARRAYREF_SLOW(padding).vec();
  const auto gaps = C10_AS_INTARRAYREF_SLOW(dilation).vec();
  const auto kernel = C10_AS_INTARRAYREF_SLOW(kernel_size);
  for (size_t i = 0; i < kernel.size(); ++i) {
    const int64_t size = input.size(static_cast<int64_t>(i) + 2);
    shape.push_back(
        (size + 2 * margins[i] - gaps[i] * (kernel[i] - 1) - 1) / steps[i] + 1);
  }
  at::Tensor result = at::empty(shape, input.options());
  MemoryViews views;
  enqueue_kernel(
      current_stream(input.device().index()),
      [to = views.of(result), from = views.of(input),
       weights = views.of(weight),
       offsets = bias && bias->defined() ? OptionalTensor(views.of(*bias))
                                         : OptionalTensor(),
       steps, margins, gaps] {
        to.copy_(at::conv2d(from, weights, offsets, steps, margins, gaps,
                            /*groups=*/from.size(1)));
      });
  return result;
}

std::tuple<at::Tensor, at::Tensor> depthwise_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef /*kernel_size*/, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation,
    std::array<bool, 2> mask) {
  const at::Tensor of_input = mask[0] ? at::empty_like(input) : at::Tensor();
  const at::Tensor of_weight = mask[1] ? at::empty_like(weight) : at::Tensor();
  MemoryViews views;
  const auto view_if = [&](const at::Tensor& tensor) {
    return tensor.defined() ? views.of(tensor) : tensor;
  };
  enqueue_kernel(current_stream(input.device().index()),
                 [grad = views.of(grad), input = views.of(input),
                  weight = views.of(weight), to_input = view_if(of_input),
                  to_weight = view_if(of_weight), steps = stride.vec(),
                  margins = padding.vec(), gaps = dilation.vec(), mask] {
                   const auto computed = at::convolution_backward(
                       grad, input, weight, at::OptionalIntArrayRef(), steps,
                       margins, gaps, /*transposed=*/false,
                       /*output_padding=*/{0, 0},
                       /*groups=*/input.size(1), {mask[0], mask[1], false});
                   if (mask[0]) to_input.copy_(std::get<0>(computed));
                   if (mask[1]) to_weight.copy_(std::get<1>(computed));
                 });
  return {of_input, of_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  library.impl("_conv_depthwise2d", &depthwise);
}

}  // namespace lockstep::internal::simulated_cuda

namespace at::native {
namespace {

// LibTorch finds this function by a table of its own, not by the dispatcher.
REGISTER_CUDA_DISPATCH(conv_depthwise2d_backward_stub,
                       &lockstep::internal::simulated_cuda::depthwise_backward)

}  // namespace
}  // namespace at::native

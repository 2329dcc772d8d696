#include "tests/parallel/fuzz/operations.h"

#include <string>

namespace lockstep::internal::fuzz {
namespace {

// Computes x A * x B + x C; one node gives all three gradients.
struct ThreeWeights : torch::autograd::Function<ThreeWeights> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& x, const torch::Tensor& a,
                               const torch::Tensor& b, const torch::Tensor& c) {
    context->save_for_backward({x, a, b, c});
    return x.mm(a) * x.mm(b) + x.mm(c);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto to_a = grads[0] * x.mm(saved[2]);
    const auto to_b = grads[0] * x.mm(saved[1]);
    return {to_a.mm(saved[1].t()) + to_b.mm(saved[2].t()) +
                grads[0].mm(saved[3].t()),
            x.t().mm(to_a), x.t().mm(to_b), x.t().mm(grads[0])};
  }
};

struct Throwing : torch::autograd::Function<Throwing> {
  static torch::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                               const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      torch::autograd::variable_list /*grads*/) {
    throw DeliberateError();
  }
};

// Returns a mask of every other element.
torch::Tensor mask_like(const torch::Tensor& tensor) {
  return torch::arange(tensor.numel(), tensor.options().dtype(torch::kLong))
      .remainder(2)
      .eq(0)
      .view(tensor.sizes());
}

}  // namespace

std::vector<std::vector<int64_t>> sizes_for(OpKind kind, int64_t width) {
  const std::vector<int64_t> square{width, width};
  switch (kind) {
    case OpKind::linear:
    case OpKind::linear_in_place:
      return {square, {width}};
    case OpKind::product:
    case OpKind::masked:
    case OpKind::outer:
    case OpKind::where:
      return {square, square};
    case OpKind::batched:
      return {{2, width, width}, {2, width, width}};
    case OpKind::addmm:
    case OpKind::custom:
      return {square, square, square};
    case OpKind::lora:
      return {{1, width}, {width, 1}};
    case OpKind::merged_lora:
      return {square, {2, width}, {width, 2}};
    case OpKind::transposed:
    case OpKind::reshaped:
      return {square};
    case OpKind::chunked:
      return {{2 * width, width}};
    case OpKind::scale:
      return {{1}};
    case OpKind::scalar:
      return {{}};
    case OpKind::empty:
      return {{0, width}};
    case OpKind::rotated:
    case OpKind::bias:
    case OpKind::auxiliary_loss:
      return {{width}};
    case OpKind::embedding:
      return {{4, width}};
    case OpKind::running_mean:
      return {};
    case OpKind::returned_parameter:
      return {square};
  }
  return {};
}

torch::Tensor compute(OpKind kind, const torch::Tensor& x,
                      const std::vector<torch::Tensor>& parameters) {
  const auto& p = parameters;
  switch (kind) {
    case OpKind::linear:
      return x.mm(p[0]) + p[1];
    case OpKind::linear_in_place:
      return x.mm(p[0]).add_(p[1]).relu_();
    case OpKind::product:
      return x.mm(p[0].mm(p[1]));
    case OpKind::masked:
      return x.mm(p[0] * p[1]);
    case OpKind::outer:
      return x.mm(p[0].mm(p[1].t()));
    case OpKind::batched:
      return x.mm(torch::bmm(p[0], p[1]).sum(0));
    case OpKind::where:
      return x.mm(torch::where(mask_like(p[0]), p[0], p[1]));
    case OpKind::addmm:
      return x.mm(torch::addmm(p[0], p[1], p[2]));
    case OpKind::lora:
      return x + x * x.mm(p[1].mm(p[0]));
    case OpKind::merged_lora:
      return x.mm(p[0] + p[2].mm(p[1]));
    case OpKind::custom:
      return ThreeWeights::apply(x, p[0], p[1], p[2]);
    case OpKind::transposed:
      return x.mm(p[0].t());
    case OpKind::reshaped:
      return x.mm(p[0].reshape({-1}).view(p[0].sizes()));
    case OpKind::chunked: {
      const auto halves = p[0].chunk(2);
      return x.mm(halves[0]) + x.mm(halves[1]).tanh();
    }
    case OpKind::scale:
    case OpKind::scalar:
      return x * p[0];
    case OpKind::rotated:
      return torch::real(x * p[0]);
    case OpKind::empty:
      return x + p[0].sum(0);
    case OpKind::bias:
      return x + p[0];
    case OpKind::embedding:
    case OpKind::running_mean:
    case OpKind::auxiliary_loss:
    case OpKind::returned_parameter:
      break;
  }
  throw std::logic_error("this operation needs its module");
}

std::string text_of(OpKind kind, const std::vector<std::string>& names) {
  const auto& p = names;
  switch (kind) {
    case OpKind::linear:
      return "x.mm(" + p[0] + ") + " + p[1];
    case OpKind::linear_in_place:
      return "x.mm(" + p[0] + ").add_(" + p[1] + ").relu_()";
    case OpKind::product:
      return "x.mm(" + p[0] + ".mm(" + p[1] + "))";
    case OpKind::masked:
      return "x.mm(" + p[0] + " * " + p[1] + ")";
    case OpKind::outer:
      return "x.mm(" + p[0] + ".mm(" + p[1] + ".t()))";
    case OpKind::batched:
      return "x.mm(torch::bmm(" + p[0] + ", " + p[1] + ").sum(0))";
    case OpKind::where:
      return "x.mm(torch::where(every_other(" + p[0] + "), " + p[0] + ", " +
             p[1] + "))";
    case OpKind::addmm:
      return "x.mm(torch::addmm(" + p[0] + ", " + p[1] + ", " + p[2] + "))";
    case OpKind::lora:
      return "x + x * x.mm(" + p[1] + ".mm(" + p[0] + "))";
    case OpKind::merged_lora:
      return "x.mm(" + p[0] + " + " + p[2] + ".mm(" + p[1] + "))";
    case OpKind::custom:
      return "ThreeWeights::apply(x, " + p[0] + ", " + p[1] + ", " + p[2] + ")";
    case OpKind::transposed:
      return "x.mm(" + p[0] + ".t())";
    case OpKind::reshaped:
      return "x.mm(" + p[0] + ".reshape({-1}).view(" + p[0] + ".sizes()))";
    case OpKind::chunked:
      return "x.mm(" + p[0] + ".chunk(2)[0]) + x.mm(" + p[0] +
             ".chunk(2)[1]).tanh()";
    case OpKind::scale:
    case OpKind::scalar:
      return "x * " + p[0];
    case OpKind::rotated:
      return "torch::real(x * " + p[0] + ")";
    case OpKind::empty:
      return "x + " + p[0] + ".sum(0)";
    case OpKind::bias:
      return "x + " + p[0];
    case OpKind::embedding:
      return "x + torch::embedding(" + p[0] + ", rows)";
    case OpKind::running_mean:
      return "x + update_running_mean(x)";
    case OpKind::auxiliary_loss:
      return "x; aux = (x * " + p[0] + ").square().mean()";
    case OpKind::returned_parameter:
      return p[0];
  }
  return {};
}

torch::Tensor activate(Activation activation, const torch::Tensor& x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::tanh:
      return x.tanh();
    case Activation::relu:
      return x.relu();
  }
  return x;
}

torch::Tensor throw_in_backward(const torch::Tensor& x) {
  return Throwing::apply(x);
}

}  // namespace lockstep::internal::fuzz

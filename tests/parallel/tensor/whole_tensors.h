#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"

// Compares what the ranks of a tensor group have with what one process has.
namespace lockstep::internal::testing {

// Returns the whole tensor of which every rank has a part: `values`, which may
// be the parameter itself or its gradient, in the layout of `parameter`.
inline at::Tensor whole_of(const at::Tensor& values,
                           const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  const auto* layout = layout_of(parameter);
  if (layout == nullptr) return values.detach();
  auto whole = at::zeros(layout->shape, values.options());
  auto part = whole;
  for (size_t dim = 0; dim < layout->shape.size(); ++dim) {
    part = part.narrow(static_cast<int64_t>(dim), layout->box.offsets[dim],
                       layout->box.sizes[dim]);
  }
  part.copy_(values.detach());
  for (const auto& group : layout->groups) all_reduce(whole, {.group = group});
  return whole;
}

inline void expect_close(const at::Tensor& have, const at::Tensor& want,
                         double bound, const std::string& what) {
  ASSERT_EQ(have.sizes(), want.sizes()) << what;
  if (want.numel() == 0) return;
  const auto error = (have.detach() - want.detach()).abs().max();
  EXPECT_LE(error.item<double>(),
            bound * (1 + want.detach().abs().max().item<double>()))
      << what;
}

// Compares all parameters of `divided` with those of `whole`, which have the
// same names, by `value(parameter)`: the parameter or its gradient.
template <typename Value>
void expect_close_parameters(const torch::nn::Module& divided,
                             const torch::nn::Module& whole, double bound,
                             const std::string& what, const Value& value) {
  const auto have = divided.named_parameters();
  const auto want = whole.named_parameters();
  ASSERT_EQ(have.size(), want.size());
  for (const auto& item : have) {
    const auto* other = want.find(item.key());
    ASSERT_NE(other, nullptr) << item.key();
    expect_close(whole_of(value(item.value()), item.value()), value(*other),
                 bound, what + " of " + item.key());
  }
}

// Returns the norm of all gradients of the model of which each rank has parts.
inline double gradient_norm(const torch::nn::Module& module,
                            const ProcessGroupPtr& group) {
  auto parts = at::zeros({}, at::kDouble);
  auto replicated = at::zeros({}, at::kDouble);
  for (const auto& parameter : module.parameters()) {
    auto square = parameter.grad().to(at::kDouble).square().sum();
    (layout_of(parameter) != nullptr ? parts : replicated).add_(square);
  }
  if (group) all_reduce(parts, {.group = group});
  return (parts + replicated).sqrt().item<double>();
}

}  // namespace lockstep::internal::testing

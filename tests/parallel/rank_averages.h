#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

// A small model, and the gradients that one process computes for all ranks.
namespace lockstep::internal::testing {

using torch::Tensor;

inline constexpr int64_t kIn = 3;

inline torch::TensorOptions doubles() {
  return torch::TensorOptions().dtype(torch::kDouble);
}

// Returns the rows of one rank in one step.
inline Tensor rows(int rank, int step = 0) {
  torch::manual_seed(1000 * step + rank + 1);
  return torch::randn({4, kIn}, doubles());
}

inline torch::nn::Sequential small_net() {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(kIn, 5), torch::nn::Tanh(),
                            torch::nn::Linear(5, 2));
  net->to(torch::kDouble);
  return net;
}

using Gradients = std::vector<Tensor>;

// Returns the gradients of `loss`; zeros for parameters that it does not depend
// on.
inline Gradients gradients(const Tensor& loss, const Gradients& parameters) {
  auto all = torch::autograd::grad({loss}, parameters, {}, true, false, true);
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].defined()) all[i] = torch::zeros_like(parameters[i]);
  }
  return all;
}

inline Gradients averages(int size, const Gradients& parameters,
                          const std::function<Tensor(int rank)>& loss_of) {
  Gradients mean;
  for (const auto& parameter : parameters) {
    mean.push_back(torch::zeros_like(parameter));
  }
  for (int rank = 0; rank < size; ++rank) {
    const auto part = gradients(loss_of(rank), parameters);
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += part[i] / size;
  }
  return mean;
}

inline void expect_gradients(const Gradients& parameters,
                             const Gradients& expected, const char* what) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_TRUE(parameters[i].grad().defined()) << what << ", parameter " << i;
    EXPECT_TRUE(
        torch::allclose(parameters[i].grad(), expected[i], 1e-10, 1e-12))
        << what << ", parameter " << i << "\n"
        << parameters[i].grad() << "\nexpected\n"
        << expected[i];
  }
}

// Returns the loss of each rank by `net`, a module holder that is equal on all
// ranks.
template <typename Net>
auto loss_of(Net& net, int step = 0) {
  return [&net, step](int rank) {
    return net->forward(rows(rank, step)).square().sum();
  };
}

}  // namespace lockstep::internal::testing

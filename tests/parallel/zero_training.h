#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/process_group.h"

// The model and the training loops of the tests of the sharded optimizer.
namespace lockstep::internal::testing {

// Has weights that up to three ranks cut, with and without a remainder, and
// tensors that are too small to cut.
struct ZeroNetImpl : torch::nn::Module {
  explicit ZeroNetImpl(torch::Dtype dtype = torch::kFloat) {
    torch::manual_seed(1);
    first = register_module("first", torch::nn::Linear(64, 201));
    second = register_module("second", torch::nn::Linear(201, 97));
    last = register_module("last", torch::nn::Linear(97, 1));
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(second->forward(first->forward(x).tanh()).tanh());
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE(ZeroNet);

// Enough steps for a wrong bit to show.
inline constexpr int kZeroSteps = 20;

// Returns the batch of one rank in one step; each rank has another one.
inline at::Tensor zero_batch(int step, int rank, torch::Dtype dtype) {
  torch::manual_seed(uint64_t{1000} + static_cast<uint64_t>(step) * 10 +
                     static_cast<uint64_t>(rank));
  return torch::randn({6, 64}).to(dtype);
}

inline at::Tensor zero_loss(const at::Tensor& output) {
  return (output - 0.5).square().mean();
}

// Runs one backward, with gradients averaged over `group` without a wrapper.
inline void averaged_backward(const ZeroNet& net, int step,
                              const ProcessGroupPtr& group) {
  const auto dtype = net->first->weight.scalar_type();
  zero_loss(net.ptr()->forward(zero_batch(step, group->rank(), dtype)))
      .backward();
  for (auto& parameter : net->parameters()) {
    if (!parameter.grad().defined()) continue;
    all_reduce(parameter.grad(), {.group = group});
    parameter.mutable_grad().div_(group->size());
  }
}

inline void averaged_steps(const ZeroNet& net,
                           torch::optim::Optimizer& optimizer, int from, int to,
                           const ProcessGroupPtr& group) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    averaged_backward(net, step, group);
    optimizer.step();
  }
}

inline at::Tensor flat_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> parts;
  for (const auto& parameter : module.parameters()) {
    parts.push_back(parameter.detach().flatten());
  }
  return torch::cat(parts);
}

inline int64_t state_bytes(const torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adam =
        static_cast<const torch::optim::AdamWParamState&>(*state);
    bytes += static_cast<int64_t>(adam.exp_avg().nbytes() +
                                  adam.exp_avg_sq().nbytes());
  }
  return bytes;
}

}  // namespace lockstep::internal::testing

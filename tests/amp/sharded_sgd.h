#pragma once

#include <torch/torch.h>

#include <utility>
#include <vector>

#include "lockstep/comm/gradient_shards.h"

namespace lockstep::internal::testing {

// A minimal sharded optimizer: rank r of R steps elements n*r/R to n*(r+1)/R of
// each parameter's n, and leaves the others unchanged.
class ShardedSgd : public torch::optim::SGD, public GradientShards {
 public:
  ShardedSgd(std::vector<torch::Tensor> parameters, double lr,
             ProcessGroupPtr group)
      : SGD(std::move(parameters), torch::optim::SGDOptions(lr)),
        lr_(lr),
        group_(std::move(group)) {}

  const ProcessGroupPtr& shard_group() const override { return group_; }

  std::vector<at::Tensor> gradient_shards() override {
    std::vector<at::Tensor> shards;
    for (const auto& parameter : param_groups()[0].params()) {
      if (parameter.grad().defined()) shards.push_back(part(parameter.grad()));
    }
    return shards;
  }

  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : param_groups()[0].params()) {
      if (!parameter.grad().defined()) continue;
      part(parameter.detach()).sub_(part(parameter.grad()), lr_);
    }
    ++steps;
    return {};
  }

  // Returns this rank's part of `whole`: a parameter, or a tensor of its shape.
  at::Tensor part(const at::Tensor& whole) const {
    auto flat = whole.view({-1});
    int64_t begin = flat.numel() * group_->rank() / group_->size();
    int64_t end = flat.numel() * (group_->rank() + 1) / group_->size();
    return flat.slice(0, begin, end);
  }

  int steps = 0;

 private:
  double lr_;
  ProcessGroupPtr group_;
};

// Returns one parameter for each of `gradients`, which is its gradient.
inline std::vector<torch::Tensor> with_gradients(
    const std::vector<torch::Tensor>& gradients) {
  std::vector<torch::Tensor> parameters;
  for (const auto& gradient : gradients) {
    parameters.push_back(
        torch::zeros(gradient.sizes(), gradient.options().layout(c10::kStrided))
            .requires_grad_());
    parameters.back().mutable_grad() = gradient.clone();
  }
  return parameters;
}

}  // namespace lockstep::internal::testing

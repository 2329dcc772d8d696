#include "tests/parallel/zero_training.h"

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/optim/adam.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/parallel/reconfigure/training.h"

namespace lockstep::internal::testing {
namespace {

// Reaches "stepping" and "stepped" inside the sharded optimizer's step.
class MortalAdamW : public optim::AdamW {
 public:
  MortalAdamW(const ParamGroups& groups, const Options& options)
      : AdamW(groups, options) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    reach("stepping");
    auto loss = AdamW::step(std::move(closure));
    reach("stepped");
    return loss;
  }
};

struct MortalNetImpl : ZeroNetImpl {
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = reaching(first->forward(x).tanh());
    return last->forward(second->forward(hidden).tanh());
  }
};
TORCH_MODULE(MortalNet);

}  // namespace
}  // namespace lockstep::internal::testing

template <>
struct lockstep::ShardingTraits<lockstep::internal::testing::MortalAdamW>
    : lockstep::ElementWiseSharding<lockstep::optim::AdamWOptions> {};

namespace lockstep::internal::testing {
namespace {

class ZeroTraining final : public Training {
 public:
  using Sharded = ZeroRedundancyOptimizer<MortalAdamW>;

  explicit ZeroTraining(const std::string& kind) {
    const optim::AdamWOptions options{.lr = 0.01};
    if (kind == "parameters") {
      optimizer_.emplace(net_->parameters(), options);
      return;
    }
    DistributedDataParallelOptions wrapper;
    if (kind == "bfloat16") {
      wrapper.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16};
    }
    wrapper.bucket_cap_mb = 0.05;
    model_.emplace(net_, wrapper);
    optimizer_.emplace(
        *model_, options,
        ZeroRedundancyOptions{.shared_parameters = kind == "shared",
                              .step_in_backward = kind == "in_backward",
                              .cut_parameters = kind == "whole"
                                                    ? std::optional(false)
                                                    : std::nullopt});
  }

  void compute(int step) override {
    const auto batch = zero_batch(step, get_rank(), at::kFloat);
    if (model_) {
      zero_loss((*model_)->forward(batch)).backward();
      return;
    }
    zero_loss(net_->forward(batch)).backward();
    for (const auto& parameter : net_->parameters()) {
      all_reduce(parameter.grad());
      parameter.mutable_grad().div_(get_world_size());
    }
  }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<at::Tensor> parameters() const override {
    return net_->parameters();
  }

 private:
  MortalNet net_;
  std::optional<DistributedDataParallel<MortalNet>> model_;
  std::optional<Sharded> optimizer_;
};

}  // namespace

MakeTraining zero_training(const std::string& rest) {
  return [rest] { return std::make_unique<ZeroTraining>(rest); };
}

}  // namespace lockstep::internal::testing

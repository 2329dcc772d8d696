#include "tests/parallel/fuzz/wrapped.h"

#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/parallel/fuzz/reference.h"

template <>
struct lockstep::ForwardResult<lockstep::internal::fuzz::OutputRecord> {
  template <typename Visit>
  static void visit(internal::fuzz::OutputRecord& record,
                    const Visit& visit_part) {
    visit_part(record.last);
    visit_part(record.others);
  }
};

namespace lockstep::internal::fuzz {
namespace {

DistributedDataParallelOptions ddp_options(
    const Case& fuzz_case, const std::vector<torch::Tensor>& tensors) {
  DistributedDataParallelOptions all;
  for_each_ddp_option(
      [&](const char*, auto of) { of(all) = of(fuzz_case.options); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& parameter = fuzz_case.parameters[i];
    const auto name = "p" + std::to_string(i);
    if (parameter.is_ignored) {
      all.params_and_buffers_to_ignore.push_back(name);
      if (parameter.is_registered_twice) {
        all.params_and_buffers_to_ignore.push_back(name + "_again");
      }
    }
  }
  return all;
}

CommFuture average_bucket(GradBucket& bucket) {
  const auto group = default_group();
  auto average = bucket.buffer() / group->size();
  all_reduce(average);
  return completed_future(average);
}

template <class Result>
class WrappedAs final : public Wrapped {
 public:
  WrappedAs(const Case& fuzz_case, int wrapper,
            const std::vector<torch::Tensor>& tensors)
      : case_(fuzz_case),
        net_(std::make_shared<ModuleOf<Result>>(fuzz_case, wrapper, tensors)),
        tensors_(tensors),
        ddp_(net_, ddp_options(fuzz_case, tensors)) {
    if (case_.options.has_comm_hook) ddp_.register_comm_hook(average_bucket);
  }

  std::vector<Output> forward(const torch::Tensor& x, const Call& call,
                              bool synchronises) override {
    if (synchronises) return net_->take_apart(ddp_(x, call));
    auto guard = ddp_.no_sync();
    return net_->take_apart(ddp_(x, call));
  }

  std::shared_ptr<Net> net() const override { return net_; }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() override {
    const auto stepping = case_.options.stepping;
    if (stepping == Stepping::in_backward) {
      ddp_.apply_optimizer_in_backward([](std::vector<at::Tensor> parameters) {
        return std::make_unique<torch::optim::SGD>(
            std::move(parameters), torch::optim::SGDOptions(kLearningRate));
      });
      return nullptr;
    }
    if (stepping == Stepping::zero_of_list) {
      std::vector<torch::Tensor> trained;
      for (const auto& tensor : tensors_) {
        if (tensor.requires_grad()) trained.push_back(tensor);
      }
      if (case_.options.optimizer == Optimizer::adamw) {
        return std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
            trained, optim::AdamWOptions{.lr = kLearningRate, .eps = kEpsilon});
      }
      return std::make_unique<ZeroRedundancyOptimizer<optim::SGD>>(
          trained, optim::SGDOptions{.lr = kLearningRate});
    }
    const ZeroRedundancyOptions sharding{
        .shared_parameters = stepping == Stepping::zero_shared,
        .step_in_backward = stepping == Stepping::zero_in_backward};
    if (case_.options.optimizer == Optimizer::adamw) {
      return std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
          ddp_, optim::AdamWOptions{.lr = kLearningRate, .eps = kEpsilon},
          sharding);
    }
    return std::make_unique<ZeroRedundancyOptimizer<optim::SGD>>(
        ddp_, optim::SGDOptions{.lr = kLearningRate}, sharding);
  }

  void synchronize(torch::optim::Optimizer& optimizer) override {
    dynamic_cast<internal::ShardedOptimizer&>(optimizer).synchronize();
  }

 private:
  const Case case_;
  std::shared_ptr<ModuleOf<Result>> net_;
  const std::vector<torch::Tensor> tensors_;
  DistributedDataParallel<std::shared_ptr<ModuleOf<Result>>> ddp_;
};

}  // namespace

std::unique_ptr<Wrapped> wrap(const Case& fuzz_case, int wrapper,
                              const std::vector<torch::Tensor>& tensors) {
  switch (fuzz_case.outputs) {
    case Outputs::tensor:
      return std::make_unique<WrappedAs<torch::Tensor>>(fuzz_case, wrapper,
                                                        tensors);
    case Outputs::vector:
      return std::make_unique<WrappedAs<std::vector<torch::Tensor>>>(
          fuzz_case, wrapper, tensors);
    case Outputs::tuple:
      return std::make_unique<
          WrappedAs<std::tuple<torch::Tensor, std::vector<torch::Tensor>>>>(
          fuzz_case, wrapper, tensors);
    case Outputs::map:
      return std::make_unique<WrappedAs<std::map<std::string, torch::Tensor>>>(
          fuzz_case, wrapper, tensors);
    case Outputs::record:
      return std::make_unique<WrappedAs<OutputRecord>>(fuzz_case, wrapper,
                                                       tensors);
  }
  return nullptr;
}

}  // namespace lockstep::internal::fuzz

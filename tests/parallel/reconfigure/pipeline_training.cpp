#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "tests/parallel/pipeline/whole_model.h"
#include "tests/parallel/reconfigure/training.h"

namespace lockstep::internal::testing {
namespace {

constexpr int64_t kSymbols = 7;

// A stage with a table of symbols if it is tied: the first looks them up, the
// last gives their scores.
struct MortalStageImpl : torch::nn::Module {
  MortalStageImpl(int stage, int stages, bool tied)
      : is_first(stage == 0), is_last(stage + 1 == stages) {
    // The copies of a tied weight differ before the pipeline is made.
    torch::manual_seed(20 + stage);
    if (tied && (is_first || is_last)) {
      weight = register_parameter("weight", torch::randn({kSymbols, kWidth}));
    }
    layer = register_module("layer", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    if (weight.defined() && is_first) y = torch::embedding(weight, x);
    y = reaching(layer->forward(y).tanh());
    return weight.defined() && is_last ? torch::linear(y, weight) : y;
  }
  bool is_first;
  bool is_last;
  at::Tensor weight;
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(MortalStage);

struct PipelinePlan {
  std::string schedule;
  bool tied;
  bool has_replicas;
  ProcessGroupPtr pipeline;
  ProcessGroupPtr replicas{};  // or null
};

class PipelineTraining final : public Training {
 public:
  explicit PipelineTraining(const PipelinePlan& plan) : plan_(plan) {
    const int ranks = plan.pipeline->size();
    const bool has_one = plan.schedule == "1F1B" || plan.schedule == "GPipe";
    const auto schedule = make_pipeline_schedule(plan.schedule, ranks,
                                                 2 * ranks, has_one ? 1 : 2);
    const auto facts = check_pipeline_schedule(schedule);
    for (int stage = 0; stage < facts.stages; ++stage) {
      if (facts.rank_of_stage[static_cast<size_t>(stage)] !=
          plan.pipeline->rank()) {
        continue;
      }
      MortalStage module(stage, facts.stages, plan.tied);
      for (const at::Tensor& parameter : module->parameters()) {
        parameters_.push_back(parameter);
      }
      if (!plan.replicas) {
        stages_.emplace_back(stage, module);
        continue;
      }
      wrappers_.push_back(std::make_unique<Ddp>(
          module,
          DistributedDataParallelOptions{.process_group = plan.replicas}));
      stages_.emplace_back(stage, *wrappers_.back());
    }
    PipelineOptions options{
        .schedule = schedule, .loss = mse, .group = plan.pipeline};
    if (plan.tied) {
      options.loss = [](const at::Tensor& scores, const at::Tensor& target) {
        return torch::cross_entropy_loss(scores, target);
      };
      options.tied_weights = {
          TiedWeight{.holders = {{0, "weight"}, {facts.stages - 1, "weight"}}}};
    }
    pipeline_ = std::make_unique<Pipeline>(stages_, std::move(options));
    optimizer_ = std::make_unique<torch::optim::SGD>(
        parameters_, torch::optim::SGDOptions(0.1).momentum(0.9));
  }

  void compute(int step) override {
    // Batches of several shapes, which the stages tell each other of once.
    const int64_t rows = 8 * plan_.pipeline->size() + step % 3;
    torch::manual_seed(100 + 10 * step + get_rank() / plan_.pipeline->size());
    if (plan_.tied) {
      const auto symbols = torch::randint(kSymbols, {2, rows});
      pipeline_->step(symbols[0], symbols[1]);
    } else {
      const auto batch = torch::randn({2, rows, kWidth}, torch::kDouble);
      pipeline_->step(batch[0], batch[1]);
    }
  }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<at::Tensor> parameters() const override { return parameters_; }

 private:
  using Ddp = DistributedDataParallel<MortalStage>;
  const PipelinePlan plan_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::unique_ptr<Ddp>> wrappers_;
  std::vector<PipelineStage> stages_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
};

}  // namespace

// `rest` is PyTorch's name of the schedule, with "+tied" or "+replicas": two
// pipelines of two ranks.
MakeTraining pipeline_training(const std::string& rest) {
  const auto has = [&](const char* word) {
    return rest.find(word) != rest.npos;
  };
  PipelinePlan plan{.schedule = rest.substr(0, rest.find('+')),
                    .tied = has("+tied"),
                    .has_replicas = has("+replicas"),
                    .pipeline = default_group()};
  if (plan.has_replicas) {
    plan.pipeline = split_group({{0, 1}, {2, 3}});
    plan.replicas = split_group({{0, 2}, {1, 3}});
  }
  return [plan] { return std::make_unique<PipelineTraining>(plan); };
}

}  // namespace lockstep::internal::testing

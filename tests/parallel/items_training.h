#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/metrics/metrics.h"
#include "lockstep/observe/metrics_logger.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/lr_scheduler/formula_schedulers.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/swa/averaged_model.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/temporary_folder.h"

// A training of many parts: a model and a critic with an optimizer each, an
// average of the weights, a scaler of gradients, random transforms, dropout, a
// metric, a log, and parts of the program's own.
namespace lockstep::internal::testing {

inline constexpr int64_t kSamples = 48;
inline constexpr int64_t kBatch = 2;

// A sample that is augmented at random.
struct NoisySamples {
  torch::data::Example<> get(size_t index, SampleSeed seed) const {
    const auto noise = torch::randn({6}, seed.generator());
    return {noise + static_cast<double>(index) / kSamples,
            torch::full({1}, static_cast<double>(index % 3))};
  }
  size_t size() const { return kSamples; }
};

// The program's own part, with numbers and a tensor.
struct Curriculum {
  ItemState state_dict() const {
    StateTree::Dict values;
    values.set("level", level);
    return {.values = values, .tensors = {{"history", history}}};
  }
  void load_state_dict(const ItemState& state) {
    const auto* dict = state.values.as<StateTree::Dict>();
    const StateTree* found = dict ? dict->find("level") : nullptr;
    if (!found) throw std::invalid_argument("there is no level");
    level = *found->as<int64_t>();
    history = state.tensors.at(0).second.clone();
  }
  int64_t level = 0;
  at::Tensor history = torch::zeros({1}, torch::kDouble);
};

struct Drawn {
  at::Tensor state_dict() const { return torch::full({1}, value); }
  void load_state_dict(const at::Tensor& state) {
    value = state.item<int64_t>();
  }
  int64_t value = 0;
};

inline torch::nn::Sequential small_net(int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::Dropout(0.3),
                               torch::nn::BatchNorm1d(8),
                               torch::nn::Linear(8, out));
}

enum class OptimizerKind { kPlain, kSharded };

struct Training {
  torch::nn::Sequential net = small_net(1);
  torch::nn::Sequential critic = small_net(2);
  DistributedDataParallel<torch::nn::Sequential> ddp{net};
  DistributedDataParallel<torch::nn::Sequential> critic_ddp{critic};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  optim::SGD critic_optimizer{critic->parameters(),
                              {.lr = 0.05, .momentum = 0.9}};
  optim::StepLR critic_scheduler{critic_optimizer, {.step_size = 3}};
  AveragedModel<torch::nn::Sequential> ema{net,
                                           {.avg_fn = get_ema_avg_fn(0.7)}};
  GradScaler scaler{{.device = torch::kCPU, .growth_interval = 3}};
  metrics::Mean mean;
  NoisySamples samples;
  DistributedSampler sampler{kSamples};
  MetricsLogger log;
  Curriculum curriculum;
  TrainingState state;

  explicit Training(const std::string& log_path,
                    OptimizerKind kind = OptimizerKind::kPlain,
                    bool with_metric = true)
      : log(log_path, {.every_rank = true}) {
    if (kind == OptimizerKind::kPlain) {
      optimizer = std::make_unique<optim::AdamW>(
          net->parameters(), optim::AdamWOptions{.lr = 0.01});
    } else {
      optimizer = std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
          net->parameters(), optim::AdamWOptions{.lr = 0.01});
    }
    state = {.model = net.ptr(),
             .optimizer = optimizer.get(),
             .items = {{"critic", critic.ptr()},
                       {"critic_optimizer", critic_optimizer},
                       {"critic_scheduler", critic_scheduler},
                       {"ema", ema},
                       {"scaler", scaler},
                       {"sampler", sampler},
                       {"log", log},
                       {"curriculum", curriculum}}};
    if (with_metric) state.items.emplace("mean", mean);
  }

  // Goes on until `steps` steps were made in all. Draws from the generator of
  // each rank, too.
  void train(int64_t steps, SnapshotSaver* saver = nullptr) {
    for (int64_t epoch = state.next_epoch(); state.step < steps; ++epoch) {
      sampler.set_epoch(epoch);
      DataLoader loader(samples, sampler, {.batch_size = kBatch});
      for (auto& batch : loader) {
        optimizer->zero_grad();
        critic_optimizer.zero_grad();
        auto loss = (ddp(batch.data) - batch.target).square().mean();
        scaler.scale(loss).backward();
        scaler.step(*optimizer);
        scaler.update();
        critic_ddp(batch.data).square().mean().backward();
        critic_optimizer.step();
        critic_scheduler.step();
        ema.update_parameters(net);
        mean.update(loss.item<double>(), kBatch);
        ++curriculum.level;
        ++state.step;
        // Equal on all ranks, since that of the first one is saved.
        curriculum.history = torch::cat(
            {curriculum.history,
             torch::full({1},
                         scaler.get_scale() / static_cast<double>(state.step),
                         torch::kDouble)});
        log.log({{"loss", loss.item<double>()}}, state.step);
        if (saver && saver->is_due()) saver->save();
        if (state.step == steps) return;
      }
      state.epochs_run = epoch;
    }
  }

  std::string log_text() {
    log.flush();
    return read_file(log.path());
  }
};

}  // namespace lockstep::internal::testing

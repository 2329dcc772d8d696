// One rank of a training that heals whose model is divided over the ranks:
// `divided_trainer FOLDER [NAME=VALUE]...`, as healing_trainer.cpp.
//
//   model=KIND   "fsdp" is FullyShard, "fsdp_memory" the same without memory
//                that ranks share, "tensor" a tensor-parallel network with
//                dropout, "pipeline" a Pipeline with a stage for each rank, and
//                "zero" a ZeroRedundancyOptimizer of a wrapper, with parameters
//                that the ranks share.
//   epochs=N, pause=MS, snapshot=N, kill=LIST: as there, with the moments next,
//                forward (not of zero), computed, update, updated, snapshot

#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/lockstep.h"
#include "lockstep/model_parallel.h"
#include "tests/parallel/healing/trainer.h"

namespace lockstep::internal::testing {
namespace {

constexpr int64_t kWidth = 64;
constexpr int64_t kClasses = 4;

using Batch = torch::data::Example<>;

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

// A layer that says when its forward runs.
struct LayerImpl : torch::nn::Module {
  LayerImpl(int64_t from, int64_t to, std::function<void()> reached)
      : linear(register_module("linear", torch::nn::Linear(from, to))),
        reached_(std::move(reached)) {}
  at::Tensor forward(const at::Tensor& x) {
    reached_();
    return torch::tanh(linear(x));
  }
  torch::nn::Linear linear;

 private:
  std::function<void()> reached_;
};
TORCH_MODULE(Layer);

// A model, the gradients of which compute() makes of a batch.
struct Training {
  std::shared_ptr<torch::nn::Module> module{};
  std::unique_ptr<torch::optim::Optimizer> optimizer{};
  std::function<void(const Batch&)> compute{};
  bool ranks_have_same_batch = false;
};

using Reached = std::function<void()>;

Training fsdp(bool in_shared_memory, const Reached& reached) {
  struct NetImpl : torch::nn::Module {
    explicit NetImpl(const FullyShardOptions& options, const Reached& reached)
        : up([&] { return Layer(16, kWidth, reached); }, options),
          down([&] { return Layer(kWidth, kClasses, [] {}); }, options) {
      register_module("up", up.ptr());
      register_module("down", down.ptr());
    }
    at::Tensor forward(const at::Tensor& x) { return down(up(x)); }
    FullyShard<Layer> up;
    FullyShard<Layer> down;
  };
  using Net = torch::nn::ModuleHolder<NetImpl>;
  FullyShardOptions options;
  options.shared_memory = in_shared_memory;
  auto model = std::make_shared<FullyShard<Net>>(
      [&] { return Net(options, reached); }, options);
  return {.module = model->ptr(),
          .optimizer = std::make_unique<optim::AdamW>(
              (*model)->parameters(), optim::AdamWOptions{.lr = 0.01}),
          .compute = [model](const Batch& batch) {
            loss_of((*model)(batch.data), batch.target).backward();
          }};
}

Training tensor_parallel(const Reached& reached) {
  struct NetImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      return down(torch::dropout(torch::tanh(up(x)), 0.2, is_training()));
    }
    nn::ColumnParallelLinear up =
        register_module("up", nn::ColumnParallelLinear(16, kWidth));
    nn::RowParallelLinear down =
        register_module("down", nn::RowParallelLinear(kWidth, kClasses));
  };
  const auto model = std::make_shared<NetImpl>();
  return {.module = model,
          .optimizer = std::make_unique<optim::AdamW>(
              model->parameters(), optim::AdamWOptions{.lr = 0.01}),
          .compute =
              [model, reached](const Batch& batch) {
                auto output = model->forward(batch.data);
                reached();
                loss_of(output, batch.target).backward();
              },
          .ranks_have_same_batch = true};
}

Training pipeline(const Reached& reached) {
  const int rank = get_rank();
  const int ranks = get_world_size();
  // Stages need parameters of different names for snapshots.
  const torch::nn::Sequential stage(
      {{"layer" + std::to_string(rank),
        Layer(rank == 0 ? 16 : kWidth, rank + 1 == ranks ? kClasses : kWidth,
              reached)}});
  auto schedule = schedule_1f1b(ranks, 4);
  auto all = std::make_shared<Pipeline>(
      std::vector<PipelineStage>{{rank, stage}},
      PipelineOptions{.schedule = schedule, .loss = loss_of});
  return {
      .module = stage.ptr(),
      .optimizer = std::make_unique<optim::AdamW>(
          stage->parameters(), optim::AdamWOptions{.lr = 0.01}),
      .compute =
          [all](const Batch& batch) { all->step(batch.data, batch.target); },
      .ranks_have_same_batch = true};
}

Training zero() {
  torch::nn::Sequential net(torch::nn::Linear(16, 1024), torch::nn::Tanh(),
                            torch::nn::Linear(1024, kClasses));
  auto ddp =
      std::make_shared<DistributedDataParallel<torch::nn::Sequential>>(net);
  return {.module = net.ptr(),
          .optimizer = std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
              *ddp, optim::AdamWOptions{.lr = 0.01},
              ZeroRedundancyOptions{.shared_parameters = true}),
          .compute = [ddp](const Batch& batch) {
            loss_of((*ddp)(batch.data), batch.target).backward();
          }};
}

Training make(const std::string& kind, const Reached& reached) {
  if (kind == "fsdp") return fsdp(/*in_shared_memory=*/true, reached);
  if (kind == "fsdp_memory") return fsdp(/*in_shared_memory=*/false, reached);
  if (kind == "tensor") return tensor_parallel(reached);
  if (kind == "pipeline") return pipeline(reached);
  if (kind == "zero") return zero();
  throw std::invalid_argument("model=" + kind);
}

void train(const std::filesystem::path& folder,
           std::map<std::string, std::string> given) {
  const auto number = [&](const std::string& name, int64_t otherwise) {
    return given.contains(name) ? std::stoll(given[name]) : otherwise;
  };
  auto group = init_process_group("lockstep");
  const Kills kills(folder, given["kill"]);
  torch::manual_seed(1);
  TrainingState state;
  Training training =
      make(given["model"], [&] { kills.at(state.step, "forward"); });
  const auto data = torch::randn({192, 16});
  TensorDataset dataset(data, data.narrow(1, 0, kClasses).sin());
  const bool same = training.ranks_have_same_batch;
  DistributedSampler sampler(dataset,
                             {.num_replicas = same ? 1 : get_world_size(),
                              .rank = same ? 0 : get_rank()});
  DataLoader loader(dataset, sampler, {.batch_size = 8});
  state.model = training.module;
  state.optimizer = training.optimizer.get();
  state.items = {{"sampler", sampler}};
  const auto snapshots = folder / "snapshots/";
  if (number("snapshot", 0) != 0) load_snapshot(snapshots, state);
  HealedTraining healed(state);
  std::cout << "ready " << get_rank() << " " << getpid() << std::endl;

  for (int64_t epoch = state.next_epoch(); epoch < number("epochs", 2);
       ++epoch) {
    sampler.set_epoch(epoch);
    while (const auto* batch = healed.next(loader)) {
      kills.at(state.step, "next");
      healed.run(
          [&] {
            std::this_thread::sleep_for(
                std::chrono::milliseconds(number("pause", 0)));
            training.optimizer->zero_grad();
            training.compute({batch->data, batch->target});
            kills.at(state.step, "computed");
          },
          [&] {
            kills.at(state.step, "update");
            training.optimizer->step();
            ++state.step;
            kills.at(state.step, "updated");
          });
      if (number("snapshot", 0) != 0 &&
          state.step % number("snapshot", 0) == 0) {
        healed.run([&] {
          kills.at(state.step, "snapshot");
          save_snapshot(snapshots, state, {.keep_last = 2});
        });
      }
    }
    state.epochs_run = epoch;
  }
  write_result(folder / ("result-" + std::to_string(get_rank())), state,
               healed);
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  return lockstep::record([&] {
    std::map<std::string, std::string> given;
    for (int i = 2; i < argc; ++i) {
      const std::string one = argv[i];
      given[one.substr(0, one.find('='))] = one.substr(one.find('=') + 1);
    }
    lockstep::internal::testing::train(argv[1], std::move(given));
    return 0;
  });
}

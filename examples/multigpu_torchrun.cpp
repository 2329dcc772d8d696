// The program of the tutorial "Fault-tolerant Distributed Training with
// torchrun" (PyTorch tutorials, DDP series): every rank trains Linear(20, 1)
// on its part of 2,048 random samples and goes on from a snapshot when it is
// started again.
//
//   build/bin/lockstep run --standalone --nproc-per-node=2
//       build/bin/multigpu_torchrun 50 10
//
// prints, from each rank,
//
//   [CPU0] Epoch 10 | Batchsize: 32 | Steps: 32
//   Epoch 10 | Training snapshot saved at snapshot.pt       (rank 0)
//
// and, started again,
//
//   Loading snapshot
//   Resuming training from snapshot at Epoch 11

#include <cstdio>
#include <filesystem>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "examples/program.h"

namespace {

struct Options {
  int64_t total_epochs = 0;
  int64_t save_every = 0;
  int64_t batch_size = 32;
  std::string snapshot = "snapshot.pt";
};

lockstep::TensorDataset make_dataset() {
  // The same on every rank: each loads its own part of one dataset.
  torch::manual_seed(0);
  return {torch::rand({2048, 20}), torch::rand({2048, 1})};
}

class Trainer {
 public:
  explicit Trainer(const Options& options)
      : options_(options),
        device_(lockstep::local_device()),
        name_((device_.is_cuda() ? "GPU" : "CPU") +
              std::to_string(lockstep::get_local_rank())),
        dataset_(make_dataset()),
        sampler_(static_cast<int64_t>(*dataset_.size())),
        loader_(dataset_, sampler_, {.batch_size = options.batch_size}),
        layer_(20, 1),
        optimizer_(layer_->parameters(), /*lr=*/1e-3) {
    layer_->to(device_);
    state_.model = layer_.ptr();
    state_.optimizer = &optimizer_;
    if (std::filesystem::exists(options_.snapshot)) {
      std::printf("Loading snapshot\n");
    }
    if (lockstep::load_snapshot(options_.snapshot, state_)) {
      std::printf("Resuming training from snapshot at Epoch %ld\n",
                  static_cast<long>(state_.next_epoch()));
    }
    std::fflush(stdout);
  }

  void train() {
    lockstep::DistributedDataParallel<torch::nn::Linear> model(layer_);
    for (int64_t epoch = state_.next_epoch(); epoch < options_.total_epochs;
         ++epoch) {
      run_epoch(model, epoch);
      state_.epochs_run = epoch;
      if (epoch % options_.save_every == 0) save();
    }
  }

 private:
  void run_epoch(lockstep::DistributedDataParallel<torch::nn::Linear>& model,
                 int64_t epoch) {
    std::printf("[%s] Epoch %ld | Batchsize: %ld | Steps: %ld\n", name_.c_str(),
                static_cast<long>(epoch),
                static_cast<long>(options_.batch_size),
                static_cast<long>(loader_.size()));
    std::fflush(stdout);
    sampler_.set_epoch(epoch);
    for (auto& batch : loader_) {
      optimizer_.zero_grad();
      auto loss = torch::nn::functional::cross_entropy(
          model(batch.data.to(device_)), batch.target.to(device_));
      loss.backward();
      optimizer_.step();
      ++state_.step;
    }
  }

  void save() {
    lockstep::save_snapshot(options_.snapshot, state_);
    if (lockstep::get_rank() != 0) return;
    std::printf("Epoch %ld | Training snapshot saved at %s\n",
                static_cast<long>(state_.epochs_run),
                options_.snapshot.c_str());
    std::fflush(stdout);
  }

  Options options_;
  torch::Device device_;
  std::string name_;
  lockstep::TensorDataset dataset_;
  lockstep::DistributedSampler sampler_;
  lockstep::DataLoader<lockstep::TensorDataset> loader_;
  torch::nn::Linear layer_;
  torch::optim::SGD optimizer_;
  lockstep::TrainingState state_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("simple distributed training job");
  auto* epochs =
      app.add_option("total_epochs,--total_epochs,--total-epochs",
                     options.total_epochs, "Total epochs to train the model");
  auto* save_every =
      app.add_option("save_every,--save_every,--save-every", options.save_every,
                     "How often to save a snapshot");
  epochs->required()->check(CLI::Range(1, 1'000'000));
  save_every->required()->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch_size,--batch-size", options.batch_size,
                 "Input batch size on each device (default: 32)")
      ->check(CLI::Range(1, 2048));
  app.add_option("--snapshot", options.snapshot,
                 "Path of the snapshot (default: snapshot.pt)");
  CLI11_PARSE(app, argc, argv);
  return examples::run_program("multigpu_torchrun", [&] {
    auto group = lockstep::init_process_group();
    Trainer(options).train();
  });
}
